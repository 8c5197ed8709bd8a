"""Training: state, optimizer, averages, checkpoints, metrics."""
