"""Representation auto-encoders: latents are the features of a frozen vision transformer.

`dinov2`: DINOv2-B with registers and the decoder of RAE (arXiv 2510.11690), normalised by the
statistics of every cell. `siglip`: SigLIP-2 So400M and the decoder of Scale-RAE. Both squeeze the
picture to one square size first, so a latent always has the same grid.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from pid_jax.diffusion import resampling
from pid_jax.encoders.frozen import Frozen, check_dtype
from pid_jax.encoders.vit import MaeDecoder, Vit
from pid_jax.encoders.weights import RANDOM, open_weights, random_params, shapes_of
from pid_jax.errors import UserError
from pid_jax.models.convolution import layer_norm
from pid_jax.models.layers import Params

FEATURE_EPS = 1e-6
STATISTICS_EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Family:
    """What a latent space fixes beside its networks.

    Attributes:
      encoder, decoder: options of the full-size networks.
      input_size: side in pixels that the encoder sees.
      input_matrix: how pictures are resized to it.
      mean, std: of the colours in [0, 1].
      statistics: latents are normalised cell by cell.
      output_size: side of the decoded picture; 0: as the decoder gives it.
    """

    encoder: dict[str, Any]
    decoder: dict[str, Any]
    input_size: int
    input_matrix: resampling.Matrix
    mean: tuple[float, ...]
    std: tuple[float, ...]
    statistics: bool
    output_size: int = 0


SIGLIP = {"hidden_size": 1152, "num_layers": 27, "num_heads": 16, "mlp_size": 4304, "grid": 16,
          "class_token": False, "registers": 0, "layer_scale": False, "exact_gelu": False}
FAMILIES = {
    "dinov2": Family({}, {}, 448, resampling.bicubic_matrix, (0.485, 0.456, 0.406),
                     (0.229, 0.224, 0.225), statistics=True),
    "siglip": Family(SIGLIP, {"in_size": 1152, "patch_size": 14, "grid": 16}, 224,
                     resampling.bicubic_antialias_matrix, (0.5,) * 3, (0.5,) * 3,
                     statistics=False, output_size=256)}
TINY_GRID = 2
TINY = ({"num_layers": 1, "num_heads": 2, "mlp_size": 32, "grid": TINY_GRID},
        {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "mlp_size": 32, "grid": TINY_GRID})


class RepresentationCodec(Frozen):
    """A `LatentCodec` around a `Vit` and a `MaeDecoder`; `decode` clips to [-1, 1].

    Parameters: `encoder`, `decoder` and, with statistics, `stats` (`mean`, `var` [h, w, C]).
    """

    spatial_factor = 16

    def __init__(self, name: str, family: Family, encoder: Vit, decoder: MaeDecoder,
                 read: Callable[[], Params], dtype: str = "float32"):
        """Args:
          name: of the latent space; `family`: what it fixes.
          read: gives the parameters; called at their first use.
          dtype: of the networks, "float32" or "bfloat16"; features are normalised in float32.
        """
        super().__init__(read)
        self.family, self.settings = name, family
        self.encoder, self.decoder, self.dtype = encoder, decoder, check_dtype(dtype)
        self._encode, self._decode = jax.jit(self._encoded), jax.jit(self._decoded)

    def shapes(self) -> Params:
        """Those of both networks and of the statistics."""
        shapes = {"encoder": shapes_of(self.encoder), "decoder": shapes_of(self.decoder)}
        if self.settings.statistics:
            cell = jax.ShapeDtypeStruct((self.grid, self.grid, self.channels), jnp.float32)
            shapes["stats"] = {"mean": cell, "var": cell}
        return shapes

    @property
    def channels(self) -> int:
        """Channels of the latent."""
        return self.encoder.hidden_size

    @property
    def grid(self) -> int:
        """Side of a latent in cells."""
        return self.settings.input_size // self.encoder.patch_size

    def encode(self, images: jax.Array) -> jax.Array:
        """float32 [B, S, S, 3] in [-1, 1] -> float32 [B, grid, grid, channels], S = 16 grid.

        Raises: UserError for pictures of another size; `squeeze` takes any.
        """
        self.check_images(images.shape)
        return self.squeeze(images)

    def check_images(self, shape: tuple[int, ...]) -> None:
        """Raises UserError for pictures that `encode` does not take."""
        side = self.grid * self.spatial_factor
        if len(shape) != 4 or tuple(shape[1:]) != (side, side, 3):
            raise UserError(f"the {self.family} codec encodes pictures [B, {side}, {side}, 3], got "
                            f"shape {tuple(shape)}; crop or resize the image first")

    def squeeze(self, images: jax.Array) -> jax.Array:
        """As `encode` for pictures [B, H, W, 3] of any size, as the reference takes them: they are
        resized to a square, which changes their aspect ratio."""
        return self._encode(self.arrays, images)

    def decode(self, latents: jax.Array) -> jax.Array:
        """float32 [B, grid, grid, channels] -> float32 [B, S, S, 3] in [-1, 1]."""
        if latents.ndim != 4 or latents.shape[1:] != (self.grid, self.grid, self.channels):
            raise UserError(f"the {self.family} codec decodes latents [B, {self.grid}, {self.grid},"
                            f" {self.channels}], got shape {tuple(latents.shape)}")
        return self._decode(self.arrays, latents)

    def resized(self, images: jax.Array) -> jax.Array:
        """Pictures in [0, 1] of the size that the encoder sees."""
        images, side = images.astype(jnp.float32) * 0.5 + 0.5, self.settings.input_size
        if images.shape[1:3] == (side, side):
            return images
        return resampling.resize(images, side, side, self.settings.input_matrix)

    def hidden(self, params: Params, images: jax.Array) -> jax.Array:
        """The encoder's patch tokens, float32 [B, grid, grid, channels], without a last norm."""
        mean, std = jnp.asarray(self.settings.mean), jnp.asarray(self.settings.std)
        normed = ((self.resized(images) - mean) / std).astype(self.dtype)
        return self.encoder.apply({"params": params["encoder"]}, normed).astype(jnp.float32)

    def features(self, params: Params, images: jax.Array) -> jax.Array:
        """`hidden` after a LayerNorm without scale and bias."""
        return layer_norm({}, self.hidden(params, images), FEATURE_EPS)

    def _encoded(self, params: Params, images: jax.Array) -> jax.Array:
        features = self.features(params, images)
        if not self.settings.statistics:
            return features
        mean, std = self.statistics(params)
        return (features - mean) / std

    def _decoded(self, params: Params, latents: jax.Array) -> jax.Array:
        if self.settings.statistics:
            mean, std = self.statistics(params)
            latents = latents * std + mean
        picture = self.decoder.apply({"params": params["decoder"]}, latents.astype(self.dtype))
        picture = picture.astype(jnp.float32) * jnp.asarray(self.settings.std)
        picture = jnp.clip(picture + jnp.asarray(self.settings.mean), 0, 1)
        if side := self.settings.output_size:
            picture = resampling.resize(picture, side, side, resampling.bicubic_matrix)
        return jnp.clip(picture, 0, 1) * 2 - 1

    def statistics(self, params: Params) -> tuple[jax.Array, jax.Array]:
        mean, var = (params["stats"][name].astype(jnp.float32) for name in ("mean", "var"))
        return mean, jnp.sqrt(var + STATISTICS_EPS)


def networks_of(name: str, encoder: Mapping[str, Any] = MappingProxyType({}),
                decoder: Mapping[str, Any] = MappingProxyType({})) -> tuple[Vit, MaeDecoder]:
    """The networks of a latent space; the arguments replace their full-size options."""
    family = FAMILIES[name]
    return Vit(**family.encoder | {**encoder}), MaeDecoder(**family.decoder | {**decoder})


def open_codec(name: str, weights: str = "", dtype: str = "float32") -> RepresentationCodec:
    """The codec of a latent space.

    Args:
      weights: folder with the weights (see `encoders.weights`), or "random" for tiny networks with
        random ones, which encode pictures of 32 pixels.
      dtype: see `RepresentationCodec`.
    """
    family = FAMILIES[name]
    if weights == RANDOM:
        encoder, decoder = networks_of(name, *TINY)
        family = dataclasses.replace(family, input_size=TINY_GRID * encoder.patch_size,
                                     output_size=TINY_GRID * RepresentationCodec.spatial_factor)
        read = random_params
    else:
        opened = open_weights(name, weights)
        encoder, decoder = opened.make(functools.partial(networks_of, name))
        read = opened.read
    codec = RepresentationCodec(name, family, encoder, decoder, lambda: read(codec.shapes()),
                                dtype)
    return codec
