"""Layout changes between a PyTorch tensor and ours; each is exactly invertible.

(Of a kernel over time only the frame that a picture sees is kept: `LAST_FRAME_CONV`.)

All of them are indexing, reshapes and transposes, so they work on numpy and jax arrays of any
dtype and under `jax.eval_shape`.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Transform:
    """`to_jax` takes the PyTorch tensor to our layout, `to_torch` back."""

    to_jax: Callable
    to_torch: Callable


IDENTITY = Transform(lambda x: x, lambda x: x)
CONV = Transform(lambda w: w.transpose(2, 3, 1, 0), lambda w: w.transpose(3, 2, 0, 1))
POINTWISE = Transform(lambda w: w[:, :, 0, 0].T, lambda w: w.T[:, :, None, None])
"""A 1 x 1 convolution [out, in, 1, 1] <-> a linear kernel [in, out]."""
LEADING_ONE = Transform(lambda x: x[0], lambda x: x[None])
"""[1, ...] <-> [...]."""


def linear(rows: np.ndarray | None = None, columns: np.ndarray | None = None,
           parts: int = 0) -> Transform:
    """[out, in] <-> [in, out], or [parts, in, out] when the outputs hold several layers.

    `rows` and `columns` say which PyTorch output and input stands at each of our places.
    """

    def to_jax(w):
        w = _take(_take(w, rows, 0), columns, 1)
        return w.reshape(*_parts(parts), -1, w.shape[-1]).swapaxes(-1, -2)

    def to_torch(w):
        w = w.swapaxes(-1, -2).reshape(-1, w.shape[-2])
        return _take(_take(w, _inverse(columns), 1), _inverse(rows), 0)

    return Transform(to_jax, to_torch)


def vector(rows: np.ndarray | None = None, parts: int = 0) -> Transform:
    """[out] <-> [out] or [parts, out], with `rows` as in `linear`."""
    return Transform(lambda b: _take(b, rows, 0).reshape(*_parts(parts), -1),
                     lambda b: _take(b.reshape(-1), _inverse(rows), 0))


def conv_as_linear(parts: int = 0) -> Transform:
    """[out, in, 1, 1] <-> the kernel of a linear layer, as `linear`."""
    inner = linear(parts=parts)
    return Transform(lambda w: inner.to_jax(w[:, :, 0, 0]),
                     lambda w: inner.to_torch(w)[:, :, None, None])


def leading_ones(count: int) -> Transform:
    """[1, ..., 1, a, ...] <-> [a, ...]."""
    return Transform(lambda x: x.reshape(x.shape[count:]),
                     lambda x: x.reshape((1,) * count + x.shape))


def _one_frame(w):
    """A kernel over time whose earlier frames, which a picture does not see, are zero."""
    w = CONV.to_torch(w)[:, :, None]
    return jnp.concatenate([jnp.zeros_like(w)] * (w.shape[-1] - 1) + [w], axis=2)


CONV_AS_LINEAR = conv_as_linear()
LAST_FRAME_CONV = Transform(lambda w: CONV.to_jax(w[:, :, -1]), _one_frame)
CHANNEL_SCALE = Transform(lambda g: g.reshape(-1), lambda g: g.reshape(-1, 1, 1))
FRAME_CHANNEL_SCALE = Transform(lambda g: g.reshape(-1), lambda g: g.reshape(-1, 1, 1, 1))


def _parts(parts: int) -> tuple[int, ...]:
    return (parts,) if parts else ()


def _take(x, order: np.ndarray | None, axis: int):
    if order is None:
        return x
    return x[order] if axis == 0 else x[:, order]


def _inverse(order: np.ndarray | None) -> np.ndarray | None:
    return None if order is None else np.argsort(order)


# ---- orders -------------------------------------------------------------------------------------

def half_split(head_dim: int) -> np.ndarray:
    """Order of a head's channels: PyTorch turns neighbours, we turn the two halves."""
    return np.concatenate([np.arange(0, head_dim, 2), np.arange(1, head_dim, 2)])


def half_split_qkv(width: int, heads: int) -> np.ndarray:
    """Order of the 3*width outputs of a fused q, k, v projection; v keeps its own."""
    head_dim = width // heads
    rows = np.arange(3 * width).reshape(3, heads, head_dim)
    rows[:2] = rows[:2][..., half_split(head_dim)]
    return rows.reshape(-1)


def channel_major(pixels: int, channels: int) -> np.ndarray:
    """Order of a flattened patch: PyTorch has (pixel, channel), we have (channel, pixel)."""
    return np.arange(pixels * channels).reshape(pixels, channels).T.reshape(-1)


def channel_major_modulations(pixels: int, count: int, channels: int) -> np.ndarray:
    """As `channel_major` for (pixel, modulation, channel) to (modulation, channel, pixel)."""
    order = np.arange(pixels * count * channels).reshape(pixels, count, channels)
    return order.transpose(1, 2, 0).reshape(-1)
