"""The frozen features that representation alignment (REPA, arXiv 2410.06940) aligns with."""

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.diffusion import resampling
from pid_jax.encoders.protocols import LatentCodec
from pid_jax.encoders.representation_codec import FEATURE_EPS, RepresentationCodec
from pid_jax.errors import UserError
from pid_jax.models.convolution import layer_norm

IMAGENET_MEAN = np.float32([0.485, 0.456, 0.406])
IMAGENET_STD = np.float32([0.229, 0.224, 0.225])
PIXELS_PER_PATCH, PATCH = 16, 14


def dino_input(images: jax.Array) -> jax.Array:
    """What DINOv2 sees of pictures: 14 pixels for every 16, so that its patches are the network's.

    Args:
      images: float32 [B, H, W, 3] in [-1, 1].
    Returns:
      float32 [B, 14 H / 16, 14 W / 16, 3] with ImageNet's mean and deviation, bicubic
      (a = -0.75) without anti-aliasing.
    """
    normalised = (images * 0.5 + 0.5 - IMAGENET_MEAN) / IMAGENET_STD
    height, width = (side * PATCH // PIXELS_PER_PATCH for side in images.shape[1:3])
    return resampling.resize(normalised, height, width, resampling.bicubic_matrix)


def teacher_tokens(teacher: LatentCodec, images: jax.Array) -> jax.Array:
    """Frozen features [B, L, channels] of pictures float32 [B, H, W, 3] in [-1, 1].

    Of the codec `dinov2` the tokens of its transformer for `dino_input`, after a LayerNorm without
    scale; of any other its latents.
    """
    if isinstance(teacher, RepresentationCodec) and teacher.family == "dinov2":
        seen = dino_input(images).astype(teacher.dtype)
        hidden = teacher.encoder.apply({"params": teacher.arrays["encoder"]}, seen)
        latents = layer_norm({}, hidden.astype(jnp.float32), FEATURE_EPS)
    else:
        latents = teacher.encode(images)
    return jax.lax.stop_gradient(latents.reshape(len(images), -1, latents.shape[-1]))


def check_teacher(teacher: LatentCodec, features: int) -> None:
    """Refuses a teacher whose features the network's projector does not make."""
    if teacher.channels != features:
        raise UserError(f"the teacher {teacher.family!r} gives features of {teacher.channels} "
                        f"numbers, the network's projector makes {features} "
                        "(config.model.repa_features); make them equal")
