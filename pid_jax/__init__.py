"""Pixel-space diffusion transformers in JAX: PixelDiT, PiD and DiTok."""

__version__ = "0.1.0"
