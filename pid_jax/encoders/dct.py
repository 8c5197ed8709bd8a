"""A latent codec without weights: the low frequencies of an orthonormal block DCT.

Every 8x8x3 block is one vector of 192 numbers; its 16 latents are its products with 16 orthonormal
vectors, each divided by a fixed scale. Encoding what was decoded gives the same latents back, and
the only loss of decoding what was encoded is the 176 dropped frequencies. Blocks of 4x4 give 16
latents to a quarter of the area, blocks of 2x2 keep all but the fine colour (6 of 12 numbers, as
4:2:0 video does), so that less is lost.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.errors import UserError

# Orthonormal colour axes: brightness, red against blue, green against magenta.
COLOUR_AXES = np.array([[1, 1, 1], [1, 0, -1], [-1, 2, -1]]) / np.sqrt([[3], [2], [6]])

# By block size and colour axis, the scale of the coefficients (u, v) by u + v; the list's length is
# what is kept: 10 of brightness and 3 of each colour; with blocks of 2, 4 and 1. The scales are
# rounded root mean squares over eight colour photographs of scikit-image (astronaut, chelsea,
# coffee, hubble_deep_field, ihc, motorcycle_left, retina, rocket), pixels in [-1, 1].
SCALES = {
    8: ((7.0, 1.0, 0.5, 0.27), (3.4, 0.3), (1.1, 0.11)),
    4: ((3.7, 0.39, 0.19, 0.11), (1.7, 0.11), (0.55, 0.044)),
    2: ((1.9, 0.13, 0.067), (0.85,), (0.28,)),
}


@dataclasses.dataclass(frozen=True)
class DctCodec:
    """The built-in `LatentCodec`: 16 channels, one cell for 8x8 pixels, no parameters.

    Channels 0-9 are brightness, 10-12 red against blue, 13-15 green against magenta, each from low
    to high frequency ((0,0), (0,1), (1,0), (0,2), ...; vertical frequency first). `encode` and
    `decode` are one reshape and one matrix product each, so they run inside a jitted step.

    Args:
      block: pixels of a block's side: 8 (family "dct"), 4 ("dct4", 16 channels, too) or 2
        ("dct2", 6 channels). Others: UserError.
    """

    block: int = 8

    def __post_init__(self) -> None:
        if self.block not in SCALES:
            raise UserError(f"the dct codec has blocks of 8, 4 or 2 pixels, got block={self.block}")

    @property
    def family(self) -> str:
        """"dct" for blocks of 8, else "dct4" or "dct2": latent spaces of their own."""
        return "dct" if self.block == 8 else f"dct{self.block}"

    @property
    def channels(self) -> int:
        """Numbers per latent cell."""
        return len(kept_coefficients(self.block))

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent cell along each side."""
        return self.block

    def encode(self, images: jax.Array) -> jax.Array:
        """float32 [B, H, W, 3] in [-1, 1] -> float32 [B, H/block, W/block, channels].

        The latents have about unit variance on photographs.
        Raises: UserError when H or W is not a multiple of the block or there are not 3 colours.
        """
        _check_images(images.shape, self.block)
        batch, height, width, _ = images.shape
        blocks = jnp.asarray(images, jnp.float32).reshape(
            batch, height // self.block, self.block, width // self.block, self.block, 3)
        analysis = basis(self.block) / scales(self.block)[:, None, None, None]
        return jnp.einsum("biujvk,cuvk->bijc", blocks, analysis.astype(np.float32),
                          precision=jax.lax.Precision.HIGHEST)

    def decode(self, latents: jax.Array) -> jax.Array:
        """float32 [B, h, w, channels] -> float32 [B, h * block, w * block, 3], not clipped.

        Raises: UserError for another number of channels.
        """
        if latents.ndim != 4 or latents.shape[-1] != self.channels:
            raise UserError(f"the dct codec decodes latents [B, h, w, {self.channels}], got shape "
                            f"{tuple(latents.shape)}")
        batch, rows, columns, _ = latents.shape
        synthesis = basis(self.block) * scales(self.block)[:, None, None, None]
        blocks = jnp.einsum("bijc,cuvk->biujvk", jnp.asarray(latents, jnp.float32),
                            synthesis.astype(np.float32), precision=jax.lax.Precision.HIGHEST)
        return blocks.reshape(batch, rows * self.block, columns * self.block, 3)


@functools.cache
def basis(block: int = 8) -> np.ndarray:
    """The kept orthonormal vectors, float64 [channels, block row, block column, RGB]."""
    wave = _dct_matrix(block)
    return np.stack([np.einsum("i,j,k->ijk", wave[u], wave[v], COLOUR_AXES[axis])
                     for axis, u, v in kept_coefficients(block)])


@functools.cache
def scales(block: int = 8) -> np.ndarray:
    """The divisor of each channel, float64 [channels]."""
    return np.array([SCALES[block][axis][u + v] for axis, u, v in kept_coefficients(block)])


def kept_coefficients(block: int = 8) -> list[tuple[int, int, int]]:
    """(colour axis, vertical frequency u, horizontal frequency v) of each channel, in order."""
    return [(axis, u, total - u) for axis, levels in enumerate(SCALES[block])
            for total in range(len(levels)) for u in range(total + 1)
            if max(u, total - u) < block]


def _dct_matrix(size: int) -> np.ndarray:
    """The orthonormal DCT-II: row u is the cosine of frequency u at the `size` pixel centres."""
    frequency, pixel = np.arange(size)[:, None], np.arange(size)[None]
    wave = np.cos(np.pi * (2 * pixel + 1) * frequency / (2 * size)) * np.sqrt(2 / size)
    wave[0] = np.sqrt(1 / size)
    return wave


def _check_images(shape: tuple[int, ...], block: int) -> None:
    if len(shape) != 4 or shape[-1] != 3:
        raise UserError(f"a codec encodes images [B, H, W, 3], got shape {tuple(shape)}")
    height, width = shape[1:3]
    if height % block or width % block:
        raise UserError(f"the dct codec needs a height and width divisible by {block}, got "
                        f"{height} x {width}; crop or resize the image first")
