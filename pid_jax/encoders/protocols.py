"""The two protocols behind which every frozen encoder stands."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np


@runtime_checkable
class LatentCodec(Protocol):
    """Pictures to normalised latents and back.

    Attributes:
      family: which latent space this is ("dct", "flux", ...); networks trained on one family
        cannot read another.
      channels: latent channels C.
      spatial_factor: pixels per latent cell along each side.
    """

    family: str
    channels: int
    spatial_factor: int

    def encode(self, images: jax.Array) -> jax.Array:
        """float32 [B, H, W, 3] in [-1, 1] -> float32 [B, H / factor, W / factor, C].

        The latents have about zero mean and unit variance on photographs.
        Raises: UserError when H or W is not a multiple of `spatial_factor`.
        """

    def decode(self, latents: jax.Array) -> jax.Array:
        """float32 [B, h, w, C] -> float32 [B, h * factor, w * factor, 3], about [-1, 1].

        The result is not clipped. Raises: UserError for a wrong channel count.
        """


@runtime_checkable
class TextEncoder(Protocol):
    """Captions to a fixed number of token embeddings.

    Attributes:
      width: size E of one embedding.
      length: tokens T of every caption; longer captions are cut, shorter ones filled up.
      null: float32 [T, E], the embedding of the empty caption.
    """

    width: int
    length: int
    null: np.ndarray

    def embed(self, captions: Sequence[str]) -> np.ndarray:
        """B captions of any language -> float32 [B, T, E]."""
