"""Mathematics of diffusion: paths, time sampling, guidance, solvers, noising, losses, schedules."""
