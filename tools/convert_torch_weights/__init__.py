"""PyTorch weights in and out of this project."""
