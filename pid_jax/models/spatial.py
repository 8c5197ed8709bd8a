"""Rearranging, resizing and padding grids `[B, H, W, C]`, with PyTorch's index conventions."""

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.errors import UserError

PADDING_MODES = {"zeros": "constant", "replicate": "edge", "reflect": "reflect", "circular": "wrap"}


def space_to_channels(x: jax.Array, factor: int) -> jax.Array:
    """Folds cells of `factor` x `factor` into channels ordered (channel, row, column).

    The order of torch's `unfold` and `pixel_unshuffle`.

    Args:
      x: `[B, H * factor, W * factor, C]`.
    Returns: `[B, H, W, C * factor**2]`. Raises UserError when a side is not divisible.
    """
    batch, height, width, channels = x.shape
    if height % factor or width % factor:
        raise UserError(f"a grid of {height}x{width} cannot be folded in cells of"
                        f" {factor}x{factor}: make both sides multiples of {factor}")
    x = x.reshape(batch, height // factor, factor, width // factor, factor, channels)
    x = x.transpose(0, 1, 3, 5, 2, 4)
    return x.reshape(batch, height // factor, width // factor, channels * factor**2)


def channels_to_space(x: jax.Array, factor: int) -> jax.Array:
    """Unfolds channels ordered (channel, row, column) into space: undoes `space_to_channels`.

    Args:
      x: `[B, H, W, C * factor**2]`.
    Returns: `[B, H * factor, W * factor, C]`. Raises UserError when C does not divide.
    """
    batch, height, width, channels = x.shape
    if channels % factor**2:
        raise UserError(f"{channels} channels cannot be unfolded into cells of {factor}x{factor}:"
                        f" their number must be a multiple of {factor**2}")
    x = x.reshape(batch, height, width, channels // factor**2, factor, factor)
    x = x.transpose(0, 1, 4, 2, 5, 3)
    return x.reshape(batch, height * factor, width * factor, channels // factor**2)


def nearest_index(size_in: int, size_out: int) -> np.ndarray:
    """Source index int `[size_out]` of every output: floor(i * in/out).

    PyTorch forms the ratio and the product in float32, which for some sizes (2 -> 82)
    falls one below the exact quotient; the same rounding is kept here.
    """
    ratio = np.float32(size_in) / np.float32(size_out)
    index = np.floor(np.arange(size_out, dtype=np.float32) * ratio).astype(np.int64)
    return np.minimum(index, size_in - 1)


def resize_nearest(x: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Nearest-neighbour resize of `[B, H, W, C]` to `size` = (height, width), axis by axis."""
    for axis, length in zip((1, 2), size):
        if x.shape[axis] != length:
            x = jnp.take(x, nearest_index(x.shape[axis], length), axis=axis)
    return x


def linear_taps(size_in: int, size_out: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower index, upper index and upper weight (float32), each `[size_out]`.

    Pixel centres at half integers (`align_corners=False`), positions clamped at the first centre.
    """
    ratio = np.float32(size_in) / np.float32(size_out)
    centres = np.arange(size_out, dtype=np.float32) + np.float32(0.5)
    position = np.maximum(centres * ratio - np.float32(0.5), np.float32(0))
    lower = np.minimum(position.astype(np.int64), size_in - 1)
    return lower, np.minimum(lower + 1, size_in - 1), position - lower.astype(np.float32)


def resize_bilinear(x: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Bilinear resize of `[B, H, W, C]` to `size`: `align_corners=False`, no anti-aliasing.

    The interpolation runs in float32 whatever the input's dtype, which the result keeps.
    """
    out = x.astype(jnp.float32)
    for axis, length in zip((1, 2), size):
        if x.shape[axis] != length:
            out = _interpolate(out, axis, length)
    return out.astype(x.dtype)


def _interpolate(x: jax.Array, axis: int, length: int) -> jax.Array:
    lower, upper, weight = linear_taps(x.shape[axis], length)
    weight = weight.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    return jnp.take(x, lower, axis) * (1 - weight) + jnp.take(x, upper, axis) * weight


def check_padding_mode(mode: str) -> None:
    """Raises UserError unless `mode` is one of PADDING_MODES."""
    if mode not in PADDING_MODES:
        raise UserError(f"lq_conv_padding_mode is {mode!r}; choose one of"
                        f" {', '.join(PADDING_MODES)}")


def pad_border(x: jax.Array, amount: int, mode: str) -> jax.Array:
    """Adds `amount` rows and columns on every side of `[B, H, W, C]`.

    Args:
      mode: "zeros", "replicate", "reflect" or "circular", as torch's Conv2d `padding_mode`.
    Raises UserError for an unknown mode and for a grid too small to reflect or wrap.
    """
    check_padding_mode(mode)
    smallest = {"reflect": amount + 1, "circular": amount}.get(mode, 1)
    height, width = x.shape[1:3]
    if min(height, width) < smallest:
        raise UserError(
            f"{mode} padding by {amount} needs a grid of at least {smallest}x{smallest} patches,"
            f" this one is {height}x{width}: use a larger image or lq_conv_padding_mode"
            " 'replicate'")
    border = ((0, 0), (amount, amount), (amount, amount), (0, 0))
    return jnp.pad(x, border, mode=PADDING_MODES[mode])
