"""A tiny PiD teacher on real photographs: decodes 4x smaller pictures' latents.

Paper: PiD, arXiv 2605.23902. Codec and text encoder need no download (block DCT, hashed words).

    python -m pid_jax.data.photos --dst runs/photos
    python -m pid_jax.main --config=configs/quickstart_pid.py --workdir=runs/pid

Hardware: two CPU cores, 2 GB of memory, minutes; `launch/quickstart.sh` does it all.
Expect: `samples/step_*.png` (bicubic | PiD | truth) become recognisable photographs, and
`plots/training.png` a falling loss.

Beside the reference's teacher everything trains (there is no backbone to freeze), the network
predicts the picture, and each patch is one latent cell: 8 pixels, 2 of the small picture.

`:flux`, `:qwenimage` and so on put another codec in place, tiny and with random weights.
"""

from ml_collections import ConfigDict

from configs.common import networks, quickstart
from pid_jax.encoders import CODECS, build_codec
from pid_jax.registry import unknown

STEPS = 2000


def get_config(variant: str = "") -> ConfigDict:
    """The config; a variant is the name of a latent codec to use in its place."""
    config = quickstart.quickstart()
    config.objective = "pid_teacher"
    config.codec = ConfigDict({"name": "dct", "block": 2})
    config.model = ConfigDict(networks.pidnet(**networks.TINY | {
        "hidden_size": 128, "num_groups": 4, "patch_depth": 1, "lq_interval": 1,
        "pixel_attn_hidden_size": 64, "pixel_num_groups": 4,
        "rope_ref_h": 64, "rope_ref_w": 64,
        "lq_latent_channels": 6, "latent_spatial_down_factor": 2,
        # The LQ convolutions start at N(0, 0.02^2) as in the reference, whose width of 1024 makes
        # that no loss; narrow ones start so faint that colours are learned late or never.
        "lq_hidden_dim": 192, "lq_num_res_blocks": 0, "zero_init_lq": False,
        "train_lq_proj_only": False}))
    config.data.image_size = 64
    config.data.resize = "random"
    config.data.permute_colours = True
    config.data.batch_size = 8
    config.optim.lr = 2e-3
    config.optim.warm_up_steps = (100,)
    config.optim.weight_decay = 0.3  # norms hide the weights' size, and large weights learn slowly
    config.optim.betas = (0.9, 0.99)
    config.optim.decay = "cosine"
    config.optim.cycle_lengths = (STEPS,)
    config.optim.f_min = (0.02,)
    config.flow.prediction_type = "x0"
    config.flow.shift = 8.0  # most updates near pure noise, where the latent has to tell it all
    config.noising.enabled = True
    config.noising.apply_prob = 0.25
    config.noising.add_sigma_max = 0.4
    config.align.enabled = True
    config.total_steps = STEPS
    config.checkpoint.every = 1000
    config.sample.every = 1000
    config.sample.image_size = 256
    config.sample.steps = 2
    config.sample.guidance = 1.0
    config.log.every = 100
    if variant:
        _use_codec(config, variant)
    return config


def _use_codec(config: ConfigDict, name: str) -> None:
    """Tiny and with random weights, whose latents mean nothing: only to see that all runs."""
    if name not in CODECS or name == "dct":
        raise unknown("variant", name, CODECS.keys() - {"dct"})
    config.codec = ConfigDict({"name": name, "weights": "random"})
    codec = build_codec(**config.codec)
    config.model.lq_latent_channels = codec.channels
    config.model.latent_spatial_down_factor = codec.spatial_factor
    if name in ("dinov2", "siglip"):  # they take one size of picture
        config.data.image_size = config.sample.image_size = 4 * 32
