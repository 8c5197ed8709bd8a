"""Rotary position embedding in half-split form.

Channel i of the first half of a head turns together with channel i of the second half, by the
angle of pair i. PyTorch's PixelDiT turns neighbouring channels instead; permuting the q and k
columns at import makes the two equal. Tables are computed in float64 and cast once to float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROPE_MODES = ("original", "ntk_aware")
IMAGE_THETA = 10000.0
IMAGE_EXTENT = 16.0


class RopeTable(NamedTuple):
    """Cosines and sines, [L, d/2] float32 each, for a head of d channels."""

    cos: jax.Array
    sin: jax.Array


def axis_theta(head_dim: int, n: int, reference: int, mode: str) -> float:
    """Base of the frequencies of one image axis with `n` positions.

    "ntk_aware" stretches it to 10000 * (n/reference)^(a/(a-2)), a = head_dim/2 channels per axis.
    """
    if mode != "ntk_aware":
        return IMAGE_THETA
    channels = head_dim // 2
    return IMAGE_THETA * (n / reference) ** (channels / (channels - 2))


def axis_angles(head_dim: int, n: int, theta: float, extent: float = IMAGE_EXTENT) -> np.ndarray:
    """Angles [n, head_dim/4] float64 of positions linspace(0, extent, n), both ends included."""
    frequencies = theta ** (-4 * np.arange(head_dim // 4, dtype=np.float64) / head_dim)
    return np.linspace(0.0, extent, n)[:, None] * frequencies


def image_rope(head_dim: int, grid: tuple[int, int], mode: str = "original",
               reference: tuple[int, int] = (0, 0)) -> RopeTable:
    """Tables for a (rows, columns) grid; pairs alternate x0, y0, x1, y1, ..., x being the column.

    Args:
      head_dim: channels of a head, a multiple of 4.
      mode: "original", "ntk_aware", or "extrapolated" (class-conditional networks): positions span
        the grid's own size instead of 16.
      reference: the (rows, columns) grid at which "ntk_aware" changes nothing.
    """
    y, x = (axis_angles(head_dim, n, axis_theta(head_dim, n, known, mode),
                        float(n) if mode == "extrapolated" else IMAGE_EXTENT)
            for n, known in zip(grid, reference))
    return RopeTable(_spread(np.cos(x), np.cos(y)), _spread(np.sin(x), np.sin(y)))


def _spread(x: np.ndarray, y: np.ndarray) -> jax.Array:
    """[columns, a], [rows, a] -> [rows * columns, 2a], x and y alternating."""
    x, y = x.astype(np.float32), y.astype(np.float32)
    rows, columns, width = len(y), len(x), x.shape[1]
    shape = (rows, columns, width)
    # Spread inside the program: the constants in it stay as small as one axis.
    both = jnp.stack([jnp.broadcast_to(x, shape), jnp.broadcast_to(y[:, None], shape)], axis=-1)
    return both.reshape(rows * columns, 2 * width)


def grid_rope(head_dim: int, grid: tuple[int, int], plain: int = 0) -> RopeTable:
    """Tables of JiT: the first half of the pairs turns by the row, the second by the column.

    Positions count 0, 1, 2, ...; frequencies are 10000^(-4i/head_dim).

    Args:
      head_dim: channels of a head, a multiple of 4.
      plain: tokens before the grid that are not turned.
    """
    rows, columns = grid
    frequencies = IMAGE_THETA ** (-4 * np.arange(head_dim // 4, dtype=np.float64) / head_dim)
    row = np.repeat(np.arange(rows, dtype=np.float64), columns)[:, None] * frequencies
    column = np.tile(np.arange(columns, dtype=np.float64), rows)[:, None] * frequencies
    angles = np.concatenate([np.zeros((plain, head_dim // 2)),
                             np.concatenate([row, column], axis=1)])
    return RopeTable(jnp.asarray(np.cos(angles), jnp.float32),
                     jnp.asarray(np.sin(angles), jnp.float32))


def text_rope(head_dim: int, length: int, theta: float = 10000.0) -> RopeTable:
    """Tables for text positions 0, 1, 2, ... with frequencies theta^(-2i/head_dim)."""
    frequencies = theta ** (-2 * np.arange(head_dim // 2, dtype=np.float64) / head_dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    return RopeTable(jnp.asarray(np.cos(angles), jnp.float32),
                     jnp.asarray(np.sin(angles), jnp.float32))


def rotate(x: jax.Array, table: RopeTable | None) -> jax.Array:
    """Turns x [B, L, H, d] by the table (None: unchanged); float32 inside, dtype of x outside."""
    if table is None:
        return x
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = table.cos[:, None], table.sin[:, None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
