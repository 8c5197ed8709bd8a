"""A tiny text-to-image PixelDiT that learns to draw twelve photographs from their captions.

Paper: PixelDiT, arXiv 2511.20645. The text encoder needs no download (hashed words).

    python -m pid_jax.data.photos --dst runs/whole --tile 0
    python -m pid_jax.main --config=configs/quickstart_pixeldit.py --workdir=runs/pixeldit
    python -m pid_jax.generate --checkpoint runs/pixeldit --out runs/drawn --prompts "galaxies"

Hardware: two CPU cores, 2 GB of memory, minutes.
Expect: `samples/step_*.png` become small versions of the photographs that the captions name, and
`plots/training.png` a falling loss.
"""

from ml_collections import ConfigDict

from configs.common import networks, quickstart

STEPS = 1200


def get_config(variant: str = "") -> ConfigDict:
    """The config; it has no variants."""
    config = quickstart.quickstart()
    config.objective = "pixeldit_t2i"
    config.model = ConfigDict(networks.pixeldit_t2i(**networks.TINY | {
        "rope_ref_h": 64, "rope_ref_w": 64}))
    config.data.path = "runs/whole/train"
    config.data.image_size = 64
    config.data.batch_size = 8
    config.data.crop = "center"
    config.data.flip = False
    config.data.caption_fields = ("prompt_short",)
    config.optim.lr = 2e-3
    config.optim.weight_decay = 0.1
    config.optim.betas = (0.9, 0.99)
    config.optim.decay = "cosine"
    config.optim.cycle_lengths = (STEPS,)
    config.optim.f_min = (0.02,)
    config.flow.prediction_type = "x0"
    config.flow.shift = 2.0
    config.total_steps = STEPS
    config.checkpoint.every = 300
    config.sample.every = 300
    config.sample.guidance = 2.0
    config.sample.prompts = ("a cup of coffee", "a rocket", "a retina", "galaxies")
    config.log.every = 100
    return config
