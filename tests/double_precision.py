"""Networks in float64 throughout: what differs then is wrong, and not rounded differently."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp

# Sums in another order differ by some 1e-15; a lost, doubled or misplaced term by far more.
RELATIVE = 1e-12


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Within it, code that names `jnp.float32` computes in float64, norms and softmax too.

    A network's `dtype` and its parameters are the caller's to make float64.
    """
    with jax.enable_x64(True), mock.patch.object(jnp, "float32", jnp.float64):
        yield
