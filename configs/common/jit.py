"""Values that the trainings of JiT share (arXiv 2511.13720 and its code), and those of DiTok."""

import math

from ml_collections import ConfigDict

from configs.common import variants
from pid_jax.config import base_config

IMAGENET = 1_281_167
"""Pictures of an epoch."""
SIZES = {
    "b": {"hidden_size": 768, "depth": 12, "num_heads": 12, "bottleneck_dim": 128,
          "in_context_start": 4},
    "l": {"hidden_size": 1024, "depth": 24, "num_heads": 16, "bottleneck_dim": 128,
          "in_context_start": 8},
    "h": {"hidden_size": 1280, "depth": 32, "num_heads": 16, "bottleneck_dim": 256,
          "in_context_start": 10, "proj_drop": 0.2}}
GUIDANCE = {("b", 16): 2.9, ("b", 32): 2.9, ("l", 16): 2.4, ("l", 32): 2.5, ("h", 16): 2.2,
            ("h", 32): 2.3}
CLASSES = ("207", "360", "387", "974", "88", "979", "417", "279")
"""Samples: golden retriever, otter, red panda, geyser, macaw, valley, balloon, arctic fox."""


def pixels(side: int) -> ConfigDict:
    """The base of both: ADM's square centre, bfloat16, AdamW (0.9, 0.95), two averages."""
    config = base_config()
    config.dtype = "bfloat16"
    config.data.path = "data/train"
    config.data.image_size = side
    config.data.resize = "adm"
    config.data.flip = True
    config.data.caption_fields = ("label", "prompt")
    config.data.caption_dropout = 0.0
    config.optim.betas = (0.9, 0.95)
    config.optim.f_start = (0.0,)
    config.ema.decay = 0.9999
    config.ema.others = (("ema2", "constant", 0.9996),)
    config.checkpoint.every = 5000
    config.sample.steps = 50
    config.sample.sampler = "heun"
    config.sample.guidance_interval = (0.1, 1.0)
    return config


def class_conditional(variant: str, size: str, patch: int) -> ConfigDict:
    """JiT on ImageNet, 600 epochs; 16 px patches at 256 px or 32 px patches at 512 px.

    Args:
      variant: "", "offline" (the same: nothing is downloaded) or "debug": 25 steps of a tiny
        network on the quick start's photographs.
      size: "b", "l" or "h".
    """
    variants.check(variant)
    config = pixels(16 * patch)
    config.objective = "jit_c2i"
    config.model = ConfigDict({
        "name": "jit", "input_size": 16 * patch, "patch_size": patch, "num_classes": 1000,
        "mlp_ratio": 4.0, "in_context_len": 32, "proj_drop": 0.0, "remat": "none"} | SIZES[size])
    config.jit.noise_scale = 1.0 if patch == 16 else 2.0
    config.data.batch_size = 1024
    epoch = IMAGENET // config.data.batch_size
    config.optim.lr = 5e-5 * config.data.batch_size / 256
    config.optim.warm_up_steps = (5 * epoch,)
    config.optim.clip_norm = math.inf
    config.total_steps = 600 * epoch
    config.sample.every = 5000
    config.sample.prompts = CLASSES
    config.sample.count = len(CLASSES)
    config.sample.guidance = GUIDANCE[size, patch]
    return _debug(config) if variant == "debug" else config


def stage2(variant: str, tokens: int, encoder: str, decoder: str) -> ConfigDict:
    """DiTok's second stage on a released TiTok.

    Args:
      variant: as in `class_conditional`.
      tokens: of the TiTok; encoder: its size; decoder: size of the diffusion decoder.
    """
    variants.check(variant)
    config = pixels(256)
    config.objective = "ditok_stage2"
    config.model = ConfigDict({
        "name": "ditok", "codebook_size": 4096, "token_size": 12, "use_l2_norm": True,
        "is_legacy": True, "vit_enc_model_size": encoder, "vit_enc_dims": (),
        "num_latent_tokens": tokens, "vit_enc_patch_size": 16, "crop_size": 256,
        "vit_dec_model_size": decoder, "vit_dec_dims": (), "patch_size": 16,
        "num_classes": 1000, "in_context_start": 0, "proj_drop": 0.0, "gamma_head": False,
        "remat": "none"})
    config.ditok.use_labels = True
    config.data.batch_size = 256
    config.optim.lr = 1e-4
    config.optim.warm_up_steps = (10_000,)
    config.optim.cycle_lengths = (500_000,)
    config.optim.f_min = (0.01,)
    config.optim.decay = "cosine_throughout"
    config.optim.clip_norm = 1.0
    config.total_steps = 500_000
    config.sample.every = 3000
    config.sample.guidance = 1.0
    return _debug(config) if variant == "debug" else config


def _debug(config: ConfigDict) -> ConfigDict:
    """25 steps of a tiny network on two CPU cores; every caption is dropped."""
    config.dtype = "float32"
    config.data.path = "runs/photos/train"
    config.data.caption_fields = ("prompt",)
    config.data.caption_dropout = 1.0
    config.data.image_size = 64
    config.data.batch_size = 4
    config.optim.warm_up_steps = (2,)
    config.total_steps = 25
    config.checkpoint.every = 10
    config.sample.every = 10
    config.sample.steps = 2
    config.sample.count = 2
    config.log.every = 5
    tiny = {"jit": {"input_size": 64, "hidden_size": 64, "depth": 2, "num_heads": 2,
                    "bottleneck_dim": 16, "in_context_start": 1},
            "ditok": {"crop_size": 64, "vit_enc_dims": (64, 1, 2),
                      "vit_dec_dims": (64, 2, 2, 16)}}
    config.model.update(tiny[config.model.name])
    if config.model.name == "ditok":
        config.sample.heldout = "runs/photos/heldout"
        config.ditok.use_labels = False  # the photographs have none
    return config
