"""Values that all trainings of the reference share (golden F00)."""

from ml_collections import ConfigDict

from configs.common import networks, prompts
from pid_jax.config import base_config
from pid_jax.errors import UserError

VARIANTS = ("", "offline")


def full_size(variant: str) -> ConfigDict:
    """The base of a full-size run: bfloat16, AdamW with warm-up, EMA, Gemma captions.

    Args:
      variant: "" or "offline", which puts encoders without weights in the place of the real ones,
        so that the run needs no download.
    """
    if variant not in VARIANTS:
        raise UserError(f"this config has no variant {variant!r}; it has 'offline'")
    config = base_config()
    config.dtype = "bfloat16"
    config.text = gemma()
    config.data.path = "data/train"
    config.data.buckets = "single"
    config.data.image_size = 2048
    config.optim.warm_up_steps = (2000,)
    config.checkpoint.every = 5000
    config.sample.every = 5000
    config.sample.steps = 50
    config.sample.image_size = 2048
    config.sample.prompts = prompts.SCENES
    config.sample.negative_prompt = prompts.NEGATIVE
    if variant == "offline":
        config.text = ConfigDict({"name": "hashed", "width": 2304, "length": 300})
    return config


def gemma() -> ConfigDict:
    """The text encoder of the released models."""
    return ConfigDict({"name": "gemma2", "width": 2304, "length": 300,
                       "instruction": prompts.INSTRUCTION})


def text_to_image(variant: str) -> ConfigDict:
    """Fine-tuning the released text-to-image PixelDiT."""
    config = full_size(variant)
    config.objective = "pixeldit_t2i"
    config.model = ConfigDict(networks.pixeldit_t2i(remat="full"))
    config.total_steps = 10_000_000
    config.optim.lr = 1e-5
    config.sample.guidance = 2.75
    return config


def pid_teacher(variant: str, codec: str, **network) -> ConfigDict:
    """Training the LQ branch of PiD v1.5 on a frozen backbone.

    Args:
      codec: latent codec, by name.
      network: options of the network that this latent family changes.
    """
    config = full_size(variant)
    config.objective = "pid_teacher"
    config.model = ConfigDict(networks.pidnet(remat="full", **network))
    config.codec = ConfigDict({"name": "dct" if variant == "offline" else codec})
    config.total_steps = 30_000
    config.optim.lr = 5e-5
    config.optim.weight_decay = 1e-3
    config.flow.dynamic_shift = True
    config.noising.enabled = True
    config.noising.latent_dropout = 0.1
    config.align.enabled = True
    config.sample.guidance = 5.0
    return config
