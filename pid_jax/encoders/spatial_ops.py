"""How an auto-encoder's layers look at an image: at the whole of it, or at one band of rows.

A convolution needs neighbours and a GroupNorm needs the statistics of the whole image; all else is
pointwise. Networks call `norm`, `conv` and `downsample` of one of the two classes here, so that a
large image can be encoded band by band with the same code.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pid_jax.models.convolution import affine, conv, group_norm
from pid_jax.models.layers import Params

GROUPS = 32
EPS = 1e-6
SMALLEST_NORM = 1e-12

Moments = tuple[jax.Array, jax.Array, jax.Array]  # count, mean, sum of squared deviations
Level = Callable[[jax.Array, "Whole"], jax.Array]


class Whole:
    """The whole image at once, `[B, H, W, C]`."""

    def norm(self, params: Params, x: jax.Array) -> jax.Array:
        """GroupNorm (parameters with a bias) or RMS norm over the channels (without)."""
        return group_norm(params, x, GROUPS, EPS) if "bias" in params else channel_norm(params, x)

    def conv(self, params: Params, x: jax.Array) -> jax.Array:
        """A 3x3 convolution with zeros around the image."""
        return conv(params, x, padding=1)

    def downsample(self, params: Params, x: jax.Array) -> jax.Array:
        """3x3, stride 2, zeros on the right and bottom only: `[B, H // 2, W // 2, C]`."""
        return conv(params, jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0))), stride=2)


class Band(Whole):
    """Some rows of an image, with a halo of rows above and below that convolutions may consume.

    GroupNorms are taken from `known`, one pair (mean, variance) [B, GROUPS] each in the order of
    the calls. The first that is not known is measured over the band's own rows into `measured`;
    what follows it is then of no use.
    """

    def __init__(self, inside: jax.Array, own: slice, known: list[tuple[jax.Array, jax.Array]]):
        """Args: inside: bool [rows], false beyond the image. own: the rows without the halo."""
        self._inside, self._own, self._known = inside, own, iter(known)
        self.measured: Moments | None = None

    def norm(self, params: Params, x: jax.Array) -> jax.Array:
        if "bias" not in params:
            return channel_norm(params, x)
        statistics = next(self._known, None)
        if statistics is None:
            self.measured = self.measured or _moments(x[:, self._own], self._inside[self._own])
            return x
        return _normalised(params, x, *statistics)

    def conv(self, params: Params, x: jax.Array) -> jax.Array:
        return super().conv(params, self._cut(x))

    def downsample(self, params: Params, x: jax.Array) -> jax.Array:
        return super().downsample(params, self._cut(x))

    def _cut(self, x: jax.Array) -> jax.Array:
        """Zeros beyond the image, where earlier layers have left something."""
        return jnp.where(self._inside[:, None, None], x, 0)


def in_bands(level: Level, x: jax.Array, rows: int, halo: int, norms: int) -> jax.Array:
    """`level(x, Whole())` for a level that ends in a downsampling, one band of rows at a time.

    Each of the level's GroupNorms takes one pass over the bands, in which its statistics are
    measured, and a last pass makes the result: all of it exact but for the order of the sums.

    Args:
      x: [B, H, W, C].
      rows: of a band, even.
      halo: rows that the level's convolutions reach beyond a band, even.
      norms: number of GroupNorms.
    """
    height = x.shape[1]
    starts = jnp.arange(0, height, rows)
    below = len(starts) * rows - height + halo
    padded = jnp.pad(x, ((0, 0), (halo, below), (0, 0), (0, 0)))
    own = slice(halo, halo + rows)

    def run(known: list, measuring: bool):
        def one(start: jax.Array):
            row = start - halo + jnp.arange(rows + 2 * halo)
            band = Band((row >= 0) & (row < height), own, known)
            piece = jax.lax.dynamic_slice_in_dim(padded, start, rows + 2 * halo, axis=1)
            out = level(piece, band)
            return band.measured if measuring else out[:, halo // 2:(halo + rows) // 2]

        return jax.lax.map(one, starts)

    known: list[tuple[jax.Array, jax.Array]] = []
    for _ in range(norms):
        known.append(_combined(run(known, measuring=True)))
    out = jnp.moveaxis(run(known, measuring=False), 0, 1)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :height // 2]


def channel_norm(params: Params, x: jax.Array) -> jax.Array:
    """x / max(||x||, 1e-12) * sqrt(C) * scale, the length over the channels, in float32."""
    wide = x.astype(jnp.float32)
    length = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))
    unit = wide / jnp.maximum(length, SMALLEST_NORM) * x.shape[-1] ** 0.5
    return unit.astype(x.dtype) * params["scale"].astype(x.dtype)


def _grouped(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32).reshape(*x.shape[:-1], GROUPS, -1)


def _moments(x: jax.Array, inside: jax.Array) -> Moments:
    """Of the rows inside the image: count [], mean and sum of squares about it [B, GROUPS]."""
    wide, inside = _grouped(x), inside[:, None, None, None]
    count = jnp.sum(inside) * (x.shape[2] * wide.shape[-1])
    mean = jnp.sum(wide * inside, axis=(1, 2, 4)) / jnp.maximum(count, 1)
    centred = (wide - mean[:, None, None, :, None]) * inside
    return count, mean, jnp.sum(centred * centred, axis=(1, 2, 4))


def _combined(bands: Moments) -> tuple[jax.Array, jax.Array]:
    """(mean, variance) [B, GROUPS] of the whole from the bands' moments (leading axis)."""
    counts, means, squares = bands
    shares = (counts / counts.sum())[:, None, None]
    mean = jnp.sum(shares * means, axis=0)
    spread = jnp.sum(shares * (means - mean) ** 2, axis=0)
    return mean, jnp.sum(squares, axis=0) / counts.sum() + spread


def _normalised(params: Params, x: jax.Array, mean: jax.Array, variance: jax.Array) -> jax.Array:
    centred = _grouped(x) - mean[:, None, None, :, None]
    normed = centred * jax.lax.rsqrt(variance + EPS)[:, None, None, :, None]
    return affine(params, normed.reshape(x.shape), x.dtype)
