"""Values that all trainings and releases of the reference share (golden F00)."""

from ml_collections import ConfigDict

from configs.common import networks, prompts
from pid_jax.config import base_config
from pid_jax.encoders import autoencoder_codec
from pid_jax.encoders.instruction import INSTRUCTION

# What each latent family changes in the network.
FLUX = {"lq_latent_channels": 16, "latent_spatial_down_factor": 8}
FLUX2 = {"lq_latent_channels": 128, "latent_spatial_down_factor": 16,
         "lq_latent_unpatchify_factor": 2}

# PiD v1 before v1.5: a narrower branch, one gate a channel, no aid to the pixel blocks.
V1 = {"lq_hidden_dim": 512, "lq_aux_rgb_head": False, "lq_conv_padding_mode": "zeros",
      "lq_gate_type": "sigma_aware_per_token_per_dim", "pit_lq_inject": False,
      "rope_ref_h": 1024, "rope_ref_w": 1024}


def full_size() -> ConfigDict:
    """The base of a full-size run: bfloat16, AdamW with warm-up, EMA, Gemma captions."""
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
    config.sample.prompts = prompts.fixed()
    config.sample.negative_prompt = prompts.NEGATIVE
    return config


def gemma() -> ConfigDict:
    """The text encoder of the released models."""
    return ConfigDict({"name": "gemma2", "width": 2304, "length": 300,
                       "instruction": INSTRUCTION, "weights": "", "tokenizer": "",
                       "stored": "", "dtype": "bfloat16", "attn_softcap": 0.0})


def text_to_image() -> ConfigDict:
    """Fine-tuning the released text-to-image PixelDiT."""
    config = full_size()
    config.objective = "pixeldit_t2i"
    config.model = ConfigDict(networks.pixeldit_t2i(remat="full", pit_chunks=4))
    config.total_steps = 10_000_000
    config.optim.lr = 1e-5
    config.sample.guidance = 2.75
    return config


def pid(codec: str, **network) -> ConfigDict:
    """What teacher, student and releases share.

    Args:
      codec: latent codec, by name.
      network: options of the network that differ from PiD v1.5 for flux latents.
    """
    config = full_size()
    config.model = ConfigDict(networks.pidnet(remat="full", pit_chunks=4, **network))
    config.codec = ConfigDict({"name": codec, "weights": "", "dtype": "bfloat16"})
    if codec in autoencoder_codec.FAMILIES:
        config.codec.band = 0
    config.flow.dynamic_shift = True
    config.sample.guidance = 5.0
    return config


def pid_teacher(codec: str, **network) -> ConfigDict:
    """Training the LQ branch of PiD v1.5 on a frozen backbone; arguments of `pid`."""
    config = pid(codec, **network)
    config.objective = "pid_teacher"
    config.total_steps = 30_000
    config.optim.lr = 5e-5
    config.optim.weight_decay = 1e-3
    config.noising.enabled = True
    config.noising.latent_dropout = 0.1
    config.align.enabled = True
    return config


def pid_student(codec: str, **network) -> ConfigDict:
    """Distilling PiD v1.5 into four steps; arguments of `pid`. All of the student trains."""
    config = pid(codec, train_lq_proj_only=False, **network)
    config.objective = "pid_student"
    config.total_steps = 3000
    config.optim.lr = 1e-5
    config.optim.warm_up_steps = (100,)
    config.noising.enabled = True
    config.align.weight = 0.1  # not used: the alignment is off
    config.distill.frozen_dtype = "bfloat16"
    config.mesh.sequence = 4
    config.checkpoint.every = 100
    config.sample.every = 100
    config.sample.steps = config.distill.steps
    config.sample.guidance = 3.0  # not used: the student draws without guidance
    return config


def released(codec: str, **network) -> ConfigDict:
    """A released four-step student, for converting and drawing; arguments of `pid`."""
    config = pid(codec, train_lq_proj_only=False, **network)
    config.objective = "pid_student"
    config.total_steps = 999_999_999
    config.noising.latent_dropout = 0.1
    config.checkpoint.every = 1000
    config.sample.steps = config.distill.steps
    config.data.buckets = "multi"
    config.data.image_size = 4096
    return config


def released_v1(codec: str, **network) -> ConfigDict:
    """A released student of PiD v1 at 2048 pixels; arguments of `pid`."""
    config = released(codec, **V1 | network)
    config.data.buckets = "single"
    config.data.image_size = 2048
    config.flow.dynamic_shift = False
    return config


def released_v1_up_to_4k(codec: str, **network) -> ConfigDict:
    """A released student of PiD v1 at 2048 to 4096 pixels; arguments of `pid`."""
    config = released(codec, **V1 | network)
    config.flow.dynamic_base_shift = 4.0
    config.flow.dynamic_image_size = 1024
    return config
