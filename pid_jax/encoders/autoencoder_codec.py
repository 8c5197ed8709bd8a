"""Latent codecs made of the convolutional auto-encoder: flux, sd3, sdxl, flux2, qwenimage."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pid_jax.encoders.autoencoder import AutoEncoder
from pid_jax.encoders.frozen import Frozen, check_dtype
from pid_jax.encoders.weights import RANDOM, open_weights, random_params, shapes_of
from pid_jax.errors import UserError
from pid_jax.models.layers import Params
from pid_jax.models.spatial import channels_to_space, space_to_channels

BN_EPS = 1e-4
WHOLE_PIXELS = 2048**2  # whose finest activations take 2 GiB each in float32
LARGE_BAND = 256
TINY = {"ch": 32, "ch_mult": (1, 1, 1, 1), "num_res_blocks": 1}


@dataclasses.dataclass(frozen=True)
class Normalisation:
    """latent = (mean of the encoder - shift) * scale, one number for all channels or one each."""

    shift: tuple[float, ...] | jax.Array
    scale: tuple[float, ...] | jax.Array

    def apply(self, mean: jax.Array) -> jax.Array:
        """The encoder's mean [..., C] as latent."""
        return (mean - jnp.asarray(self.shift)) * jnp.asarray(self.scale)

    def undo(self, latent: jax.Array) -> jax.Array:
        """A latent [..., C] as what the decoder reads."""
        return latent / jnp.asarray(self.scale) + jnp.asarray(self.shift)


def batch_normalisation(mean: jax.Array, var: jax.Array) -> Normalisation:
    """By running statistics [C] of a BatchNorm without scale and bias (Flux2)."""
    return Normalisation(mean, jax.lax.rsqrt(var + BN_EPS))


@dataclasses.dataclass(frozen=True)
class Family:
    """A latent space: options of its network, its normalisation (None: the network's own)."""

    network: dict[str, Any]
    normalisation: Normalisation | None


_QWEN_MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
              0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
_QWEN_STD = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
             3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)
FAMILIES = {
    "flux": Family({}, Normalisation((0.1159,), (0.3611,))),
    "sd3": Family({}, Normalisation((0.0609,), (1.5305,))),
    "sdxl": Family({"z_channels": 4, "quant_convs": True}, Normalisation((0.0,), (0.13025,))),
    "flux2": Family({"z_channels": 32, "quant_convs": True, "patch": 2}, None),
    "qwenimage": Family(
        {"ch": 96, "norm": "channel", "halving_upsample": True, "quant_convs": True},
        Normalisation(_QWEN_MEAN, tuple(1 / std for std in _QWEN_STD))),
}


def network_of(family: str, **sizes: Any) -> AutoEncoder:
    """The network of a latent family; `sizes` replace its full-size options."""
    return AutoEncoder(**FAMILIES[family].network | sizes)


class AutoEncoderCodec(Frozen):
    """A `LatentCodec` around an `AutoEncoder`.

    `encode` gives the mean of the encoder's distribution, never a sample; `decode` does not clip.
    Both run in `dtype` and return float32.
    """

    def __init__(self, family: str, network: AutoEncoder, read: Callable[[], Params],
                 dtype: str = "float32", band: int = 0,
                 normalisation: Normalisation | None = None):
        """Args:
          family: name of the latent space.
          read: gives the parameters; called at their first use.
          dtype: "float32" or "bfloat16" (which the reference computes in).
          band: rows of a band in which `encode` works; 0: those of `band_for`.
          normalisation: in the place of the family's own.
        """
        super().__init__(read)
        self.family, self.network, self.band = family, network, check_band(band)
        self.dtype = check_dtype(dtype)
        self.normalisation = normalisation or FAMILIES[family].normalisation
        self._encode, self._decode = jax.jit(self._encoded), jax.jit(self._decoded)
        self._moments = jax.jit(self._raw)

    def shapes(self) -> Params:
        """Those of the network."""
        return shapes_of(self.network)

    @property
    def channels(self) -> int:
        """Channels of the latent."""
        return self.network.channels

    @property
    def spatial_factor(self) -> int:
        """Pixels of a latent cell's side."""
        return self.network.factor

    def encode(self, images: jax.Array) -> jax.Array:
        """float32 [B, H, W, 3] in [-1, 1] -> float32 [B, H // factor, W // factor, channels].

        A last row or column that fills no cell of the network is left out. Raises: UserError for
        pictures that are smaller than a cell, or, where cells are folded, not a multiple of it.
        """
        self.check_images(images.shape)
        return self._encode(self.arrays, images)

    def moments(self, images: jax.Array) -> jax.Array:
        """The encoder's raw output for the same pictures: mean, then log-variance."""
        self.check_images(images.shape)
        return self._moments(self.arrays, images)

    def decode(self, latents: jax.Array) -> jax.Array:
        """float32 [B, h, w, channels] -> float32 [B, h * factor, w * factor, 3]."""
        if latents.ndim != 4 or latents.shape[-1] != self.channels:
            raise UserError(f"the {self.family} codec decodes latents [B, h, w, {self.channels}], "
                            f"got shape {tuple(latents.shape)}")
        return self._decode(self.arrays, latents)

    def check_images(self, shape: tuple[int, ...]) -> None:
        """Raises UserError for pictures that `encode` does not take."""
        if len(shape) != 4 or shape[-1] != 3:
            raise UserError(f"a codec encodes images [B, H, W, 3], got shape {tuple(shape)}")
        factor, folds = self.spatial_factor, self.network.patch > 1
        if min(shape[1:3]) < factor or folds and (shape[1] % factor or shape[2] % factor):
            what = "divisible by" if folds else "of at least"
            raise UserError(f"the {self.family} codec needs a height and width {what} {factor}, "
                            f"got {shape[1]} x {shape[2]}; crop or resize the image first")

    def band_for(self, height: int, width: int) -> int:
        """Rows of a band for pictures of this size; 0 for the whole picture at once."""
        return self.band or (LARGE_BAND if height * width > WHOLE_PIXELS else 0)

    def _raw(self, params: Params, images: jax.Array) -> jax.Array:
        moments = self.network.apply({"params": params}, images.astype(self.dtype),
                                     self.band_for(*images.shape[1:3]), method="encode")
        return moments.astype(jnp.float32)

    def _encoded(self, params: Params, images: jax.Array) -> jax.Array:
        mean = self._raw(params, images)[..., :self.network.z_channels]
        return self._normalisation(params).apply(space_to_channels(mean, self.network.patch))

    def _decoded(self, params: Params, latents: jax.Array) -> jax.Array:
        z = self._normalisation(params).undo(latents.astype(jnp.float32))
        z = channels_to_space(z, self.network.patch).astype(self.dtype)
        picture = self.network.apply({"params": params}, z, method="decode")
        return picture.astype(jnp.float32)

    def _normalisation(self, params: Params) -> Normalisation:
        if self.normalisation is not None:
            return self.normalisation
        return batch_normalisation(*(params["bn"][name].astype(jnp.float32)
                                     for name in ("mean", "var")))


def check_band(band: int) -> int:
    """`band` itself; UserError unless it is 0 or a positive even number of rows."""
    if not isinstance(band, int) or band < 0 or band % 2:
        raise UserError(f"band is {band!r}; expected an even number of rows, or 0 for bands "
                        "where the picture is large")
    return band


def open_codec(family: str, weights: str = "", dtype: str = "float32",
               band: int = 0) -> AutoEncoderCodec:
    """The codec of a latent family.

    Args:
      weights: folder with the weights (see `encoders.weights`), or "random" for a tiny network
        with random ones, whose latents have the right shape and no meaning.
      dtype, band: see `AutoEncoderCodec`.
    """
    if weights == RANDOM:
        network, read = network_of(family, **TINY), random_params
    else:
        opened = open_weights(family, weights)
        network = opened.make(functools.partial(network_of, family))
        read = opened.read
    return AutoEncoderCodec(family, network, lambda: read(shapes_of(network)), dtype, band)
