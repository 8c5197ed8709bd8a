"""Stage 1 of the quick-start chain: a tiny text-to-image PixelDiT, the backbone of the next two.

Papers: PixelDiT, arXiv 2511.20645; PiD, arXiv 2605.23902. Nothing is downloaded.

    python -m pid_jax.data.photos --dst runs/photos
    python -m pid_jax.main --config=configs/quickstart_finetune.py --workdir=runs/chain/finetune

Hardware: two CPU cores, a few minutes. Expect: a falling loss; the pictures are patches of colour
(200 updates). With `--config.init_from=runs/pixeldit` and that run's network it is a fine-tuning;
here it starts from scratch. docs/distillation.md shows all three stages.
"""

from ml_collections import ConfigDict

from configs.common import chain


def get_config(variant: str = "") -> ConfigDict:
    """The config; it has no variants."""
    config = chain.stage(200)
    config.objective = "pixeldit_t2i"
    config.model = chain.backbone(config.model)
    config.sample.image_size = 64
    config.sample.steps = 20
    config.sample.prompts = ("a cup of coffee", "a rocket", "galaxies")
    return config
