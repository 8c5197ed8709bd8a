"""Frozen encoders behind two protocols: latent codecs and text encoders, built by name."""

import functools
from typing import Any

from pid_jax import registry
from pid_jax.encoders import autoencoder_codec, representation_codec
from pid_jax.encoders.dct import DctCodec
from pid_jax.encoders.gemma_text import open_text_encoder
from pid_jax.encoders.hashed_text import HashedTextEncoder
from pid_jax.encoders.protocols import LatentCodec, TextEncoder

CODECS = {"dct": DctCodec} | {
    family: functools.partial(autoencoder_codec.open_codec, family)
    for family in autoencoder_codec.FAMILIES} | {
    family: functools.partial(representation_codec.open_codec, family)
    for family in representation_codec.FAMILIES}
# Latent family -> channels of its full-size codec.
CHANNELS = {family: autoencoder_codec.network_of(family).channels
            for family in autoencoder_codec.FAMILIES} | {
    family: representation_codec.networks_of(family)[0].hidden_size
    for family in representation_codec.FAMILIES}
TEXT_ENCODERS = {"hashed": HashedTextEncoder, "gemma2": open_text_encoder}


def build_codec(name: str, **options: Any) -> LatentCodec:
    """The latent codec `name`. Unknown names and options: UserError.

    Codecs with weights read them when they are first needed; a folder that holds those of another
    codec is refused here.
    """
    return registry.build("codec", CODECS, name, options)


def build_text_encoder(name: str, **options: Any) -> TextEncoder:
    """The text encoder `name`; weights as in `build_codec`. Unknown names, options: UserError."""
    return registry.build("text encoder", TEXT_ENCODERS, name, options)
