"""A tiny DiTok on real photographs: 32 tokens of a random tokenizer, and a decoder for them.

Tokenizer: TiTok (arXiv 2406.07550) with random, frozen weights. Decoder: JiT (arXiv 2511.13720).

    python -m pid_jax.data.photos --dst runs/photos
    python -m pid_jax.main --config=configs/quickstart_ditok.py --workdir=runs/ditok
    python -m pid_jax.evaluate_tokens --checkpoint runs/ditok --data runs/photos/heldout \
        --mean_of runs/photos/train

Hardware: two CPU cores, minutes. Expect `samples/step_*.png` (mean colour | DiTok | truth) where
photographs that were held out of training get their colours and large shapes. The last command
prints how much closer they are than the mean picture of the training set.
"""

from ml_collections import ConfigDict

from configs.common import quickstart

STEPS = 500


def get_config(variant: str = "") -> ConfigDict:
    """The config; it has no variants."""
    config = quickstart.quickstart()
    config.objective = "ditok_stage2"
    config.model = ConfigDict({
        "name": "ditok", "codebook_size": 4096, "token_size": 4, "use_l2_norm": True,
        "is_legacy": False, "vit_enc_dims": (128, 1, 4), "num_latent_tokens": 32,
        "vit_enc_patch_size": 8, "crop_size": 64, "vit_dec_dims": (128, 2, 4, 64),
        "patch_size": 16, "num_classes": 1, "in_context_start": 0, "gamma_head": False,
        "remat": "none"})
    config.jit.p_mean = -2.0  # most updates near pure noise, where the tokens have to tell it all
    config.jit.p_std = 1.2
    config.data.image_size = 64
    config.data.batch_size = 16
    config.data.resize = "random"
    config.data.permute_colours = True
    config.data.caption_dropout = 1.0
    config.optim.lr = 2e-3
    config.optim.betas = (0.9, 0.99)
    config.optim.f_start = (0.0,)
    config.optim.cycle_lengths = (STEPS,)
    config.optim.f_min = (0.02,)
    config.optim.decay = "cosine_throughout"
    config.ema.decay = 0.99
    config.ema.others = (("ema2", "constant", 0.996),)
    config.total_steps = STEPS
    config.checkpoint.every = 250
    config.sample.every = 250
    config.sample.steps = 2
    config.sample.sampler = "euler"
    config.sample.guidance = 1.0
    config.log.every = 25
    return config
