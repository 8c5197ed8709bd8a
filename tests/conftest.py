"""Every test runs in float32 with exact matmuls on the CPU unless it says otherwise."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_default_matmul_precision", "highest")
