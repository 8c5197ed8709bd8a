"""A part of a token grid that knows where it lies in the whole: for drawing by tiles."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Window(NamedTuple):
    """Tokens [top, top + rows) x [left, left + columns) of a grid.

    Attributes:
      whole: (rows, columns) of the grid; part: of the window. Python numbers.
      top, left: where it begins; numbers or int32 scalars.
    """

    whole: tuple[int, int]
    part: tuple[int, int]
    top: jax.Array | int
    left: jax.Array | int

    def cut(self, x: jax.Array) -> jax.Array:
        """The window of a map [B, rows, columns, D] of the whole grid."""
        return cut_axis(cut_axis(x, 1, self.top, self.part[0]), 2, self.left, self.part[1])


def cut_axis(x: jax.Array, axis: int, start: jax.Array | int, length: int) -> jax.Array:
    """`length` entries of an axis from `start` on."""
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), start, length, axis)
