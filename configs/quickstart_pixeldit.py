"""A tiny text-to-image PixelDiT on real photographs: learns to draw them from their captions.

Paper: PixelDiT, arXiv 2511.20645. The text encoder needs no download (hashed words).

    python -m pid_jax.data.photos --dst runs/photos
    python -m pid_jax.main --config=configs/quickstart_pixeldit.py --workdir=runs/pixeldit

Hardware: two CPU cores, 2 GB of memory, minutes. A longer run: `--config.total_steps=3000`.
Expect: colours and rough shapes of the training photographs, not new pictures; a falling loss in
`plots/training.png`.
"""

from ml_collections import ConfigDict

from configs.common import networks, quickstart


def get_config(variant: str = "") -> ConfigDict:
    """The config; it has no variants."""
    config = quickstart.quickstart()
    config.objective = "pixeldit_t2i"
    config.model = ConfigDict(networks.pixeldit_t2i(**networks.TINY))
    config.optim.lr = 1e-3
    config.sample.guidance = 2.0
    config.sample.prompts = ("a cup of coffee", "a rocket", "a retina", "galaxies")
    return config
