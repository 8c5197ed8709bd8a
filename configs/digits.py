"""A class-conditional PixelDiT that learns to draw handwritten digits in minutes on a CPU.

Paper: PixelDiT, arXiv 2511.20645. The data are scikit-learn's real 8 x 8 digits, enlarged to
16 x 16; the digit is the class.

    python -m pid_jax.data.digits --dst runs/digits/data
    python -m pid_jax.main --config=configs/digits.py --workdir=runs/digits/run
    python -m pid_jax.generate --checkpoint runs/digits/run --classes 0-9 --out runs/digits/drawn

Hardware: two CPU cores, 1 GB of memory, less than 10 minutes. Expect: digits of which a classifier
trained on the real ones recognises 9 in 10 and more; docs/imagenet.md shows a run.
"""

from ml_collections import ConfigDict

from configs.common import networks
from pid_jax.config import base_config

STEPS = 2400


def get_config(variant: str = "") -> ConfigDict:
    """The config; it has no variants."""
    config = base_config()
    config.objective = "pixeldit_c2i"
    config.model = ConfigDict(networks.pixeldit_c2i(
        hidden_size=64, num_groups=4, patch_depth=3, pixel_depth=1, patch_size=4,
        pixel_hidden_size=4, num_classes=10, label_init_std=0.5, time_init_std=0.1))
    config.data.path = "runs/digits/data"
    config.data.image_size = 16
    config.data.batch_size = 32
    config.data.caption_fields = ("label",)
    config.optim.lr = 2e-3
    config.optim.betas = (0.9, 0.99)
    config.optim.warm_up_steps = (100,)
    config.optim.decay = "cosine"
    config.optim.cycle_lengths = (STEPS,)
    config.optim.f_min = (0.05,)
    config.optim.clip_norm = 1.0
    config.ema.decay = 0.995
    config.flow.shift = 1.0
    config.total_steps = STEPS
    config.checkpoint.every = STEPS // 4
    config.checkpoint.keep = 4
    config.sample.every = STEPS // 4
    config.sample.steps = 25
    config.sample.guidance = 2.0
    config.sample.count = 10
    config.sample.prompts = tuple(str(digit) for digit in range(10))
    config.log.every = 100
    return config
