"""Frozen encoders behind two protocols: latent codecs and text encoders, built by name."""

from typing import Any

from pid_jax import registry
from pid_jax.encoders.dct import DctCodec
from pid_jax.encoders.hashed_text import HashedTextEncoder
from pid_jax.encoders.protocols import LatentCodec, TextEncoder

CODECS = {"dct": DctCodec}
TEXT_ENCODERS = {"hashed": HashedTextEncoder}


def build_codec(name: str, **options: Any) -> LatentCodec:
    """The latent codec `name` ("dct": block=8, 4 or 2). Unknown names and options: UserError."""
    return registry.build("codec", CODECS, name, options)


def build_text_encoder(name: str, **options: Any) -> TextEncoder:
    """The text encoder `name` ("hashed": width=256, length=64). Unknown: UserError."""
    return registry.build("text encoder", TEXT_ENCODERS, name, options)
