"""Making the low-quality input of a super-resolution pair, and stating what range pixels are in."""

import jax
import jax.numpy as jnp

from pid_jax.diffusion import resampling
from pid_jax.errors import UserError

RANGES = ("auto", "uint8", "unit", "signed")


def downsample(images: jax.Array, factor: float) -> jax.Array:
    """Anti-aliased bicubic down-sampling to (int(H / factor), int(W / factor)), cut to [-1, 1].

    Args:
      images: float32 [B, H, W, C] in [-1, 1].
      factor: at least 1; need not divide the size.
    Raises:
      UserError: `factor` below 1, or so large that nothing is left.
    """
    height, width = int(images.shape[1] / factor), int(images.shape[2] / factor)
    if factor < 1 or min(height, width) < 1:
        raise UserError(f"down-sampling {images.shape[1]}x{images.shape[2]} pixels by {factor} "
                        "is not possible; the factor must be between 1 and the image size")
    small = resampling.resize(images, height, width, resampling.bicubic_antialias_matrix)
    return jnp.clip(small, -1.0, 1.0)


def upsample(images: jax.Array, height: int, width: int) -> jax.Array:
    """Bicubic enlargement of float32 [B, h, w, C] in [-1, 1], cut to [-1, 1]: the baseline."""
    large = resampling.resize(images, height, width, resampling.bicubic_antialias_matrix)
    return jnp.clip(large, -1.0, 1.0)


def normalize_image(images: jax.Array, value_range: str = "auto") -> jax.Array:
    """Brings pixels to float32 in [-1, 1].

    Args:
      images: any shape; uint8 or float.
      value_range: what the pixels are in: "uint8" (0..255, any dtype), "unit" (0..1), "signed"
        (-1..1, returned as they are), or "auto": guess from the whole array as the reference
        does. The guess takes a signed image without negative values for a unit one: say the
        range wherever it is known.
    """
    if value_range not in RANGES:
        raise UserError(f"value_range is {value_range!r}; use one of {', '.join(RANGES)}")
    pixels = images.astype(jnp.float32)
    if value_range == "signed":
        return pixels
    if value_range == "unit":
        return 2.0 * pixels - 1.0
    if value_range == "uint8" or images.dtype == jnp.uint8:
        return pixels / 127.5 - 1.0
    unit_or_signed = jnp.where(pixels.min() >= 0.0, 2.0 * pixels - 1.0, pixels)
    return jnp.where(pixels.max() > 1.0, pixels / 127.5 - 1.0, unit_or_signed)
