"""Separable image resizing as two small matrix products.

Each `*_matrix(n_in, n_out)` is a float32 [n_out, n_in] numpy matrix, made on the host in float64;
`resize` applies one along rows and one along columns. All use pixel centres at half integers
(align_corners off).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

Matrix = Callable[[int, int], np.ndarray]


def resize(images: jax.Array, height: int, width: int, matrix: Matrix) -> jax.Array:
    """Resizes float32 [B, H, W, C] to [B, height, width, C], exact matmuls on every platform."""
    rows = matrix(images.shape[1], height)
    columns = matrix(images.shape[2], width)
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    images = product("ph,bhwc->bpwc", rows, images.astype(jnp.float32))
    return product("qw,bpwc->bpqc", columns, images)


def keys_cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """The cubic convolution kernel (Keys 1981) with slope `a` at distance 1."""
    x = np.abs(distance)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


@functools.cache
def bicubic_antialias_matrix(n_in: int, n_out: int) -> np.ndarray:
    """Bicubic (a = -0.5), the kernel stretched by n_in / n_out when that shrinks the image.

    The window is cut at the border and normalised, as torch's `antialias=True` and Pillow do.
    """
    scale = n_in / n_out
    stretch = max(scale, 1.0)
    centres = scale * (np.arange(n_out) + 0.5)[:, None]
    pixels = np.arange(n_in)[None, :]
    first = np.floor(np.maximum(centres - 2.0 * stretch + 0.5, 0.0))
    last = np.floor(np.minimum(centres + 2.0 * stretch + 0.5, n_in))
    weights = keys_cubic((pixels + 0.5 - centres) / stretch, -0.5)
    weights = np.where((pixels >= first) & (pixels < last), weights, 0.0)
    return _frozen(weights / weights.sum(axis=1, keepdims=True))


@functools.cache
def bicubic_matrix(n_in: int, n_out: int) -> np.ndarray:
    """Bicubic (a = -0.75) without anti-aliasing, edge pixels repeated beyond the border."""
    positions = (np.arange(n_out) + 0.5) * n_in / n_out - 0.5
    first = np.floor(positions).astype(int) - 1
    weights = np.zeros((n_out, n_in))
    for tap in range(4):
        pixel = first + tap
        np.add.at(weights, (np.arange(n_out), np.clip(pixel, 0, n_in - 1)),
                  keys_cubic(positions - pixel, -0.75))
    return _frozen(weights)


@functools.cache
def bilinear_matrix(n_in: int, n_out: int) -> np.ndarray:
    """Linear interpolation of the two nearest pixels, edge pixels repeated, no anti-aliasing."""
    positions = np.clip((np.arange(n_out) + 0.5) * n_in / n_out - 0.5, 0.0, n_in - 1.0)
    distance = np.abs(positions[:, None] - np.arange(n_in)[None, :])
    return _frozen(np.maximum(1.0 - distance, 0.0))


@functools.cache
def corner_bilinear_matrix(n_in: int, n_out: int) -> np.ndarray:
    """As `bilinear_matrix`, but output i reads position i * n_in / n_out (TensorFlow 1's rule)."""
    positions = np.minimum(np.arange(n_out) * n_in / n_out, n_in - 1.0)
    distance = np.abs(positions[:, None] - np.arange(n_in)[None, :])
    return _frozen(np.maximum(1.0 - distance, 0.0))


@functools.cache
def adaptive_mean_matrix(n_in: int, n_out: int) -> np.ndarray:
    """Plain mean over the pixels floor(i in/out) up to ceil((i + 1) in/out) (torch's `area`)."""
    first = np.arange(n_out) * n_in // n_out
    last = -(-(np.arange(1, n_out + 1) * n_in) // n_out)
    pixels = np.arange(n_in)
    inside = (pixels >= first[:, None]) & (pixels < last[:, None])
    return _frozen(inside / inside.sum(axis=1, keepdims=True))


@functools.cache
def coverage_matrix(n_in: int, n_out: int) -> np.ndarray:
    """Mean weighted by how much of each input pixel lies in the output pixel (OpenCV's area)."""
    scale = n_in / n_out
    first = (np.arange(n_out) * scale)[:, None]
    pixels = np.arange(n_in)[None, :]
    overlap = np.minimum(pixels + 1, first + scale) - np.maximum(pixels, first)
    return _frozen(np.maximum(overlap, 0.0) / scale)


def _frozen(weights: np.ndarray) -> np.ndarray:
    """Float32 and read-only: the matrix is shared by every later call."""
    weights = weights.astype(np.float32)
    weights.setflags(write=False)
    return weights
