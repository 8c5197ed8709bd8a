"""How activations are placed on devices: networks name them, a mesh (elsewhere) knows the rest.

A network calls `constrain(x, name)` with
  TOKENS  [B, L, ...]  image tokens, which a mesh may divide along L
  TEXT    [B, T, ...]  text tokens, whole on every device of a sequence group
  ROWS    [B, rows, ...]  pictures and maps on the grid of patches, which a mesh may divide by rows
  MAP     [B, rows, ...]  maps for strided convolutions, whole on every device of a sequence group
and goes on with the result, which has the same values.
"""

from collections.abc import Callable

import jax

TOKENS = "tokens"
TEXT = "text"
ROWS = "rows"
MAP = "map"

Constrain = Callable[[jax.Array, str], jax.Array]


def unconstrained(x: jax.Array, name: str) -> jax.Array:
    """Leaves the placement to the compiler: the default, for one device."""
    return x
