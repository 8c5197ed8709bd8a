"""Compiling for machines that are not here: `python -m pid_jax.parallel.aot`."""
