"""Class-conditional PixelDiT-XL on ImageNet at 512 pixels (published: FID 1.81).

Paper: PixelDiT, arXiv 2511.20645. Values: the released recipe (docs/imagenet.md).

    python -m pid_jax.data.ingest --src ILSVRC2012/train --dst data/imagenet/train512 \
        --labels folders --center-crop 512
    python -m pid_jax.main --config=configs/pixeldit_imagenet512.py --workdir=DIR \
        --config.codec.weights=DINOV2 --config.init_from=RUN256

Hardware: as at 256 pixels, with four times the tokens. Expect (published, 50,000 pictures,
FlowDPM, 100 steps): FID 1.81.
Variants: `:offline` needs no teacher's weights, `:debug` runs in minutes on a CPU
(configs/README.md).
"""

from ml_collections import ConfigDict

from configs.common import imagenet, variants


def get_config(variant: str = "") -> ConfigDict:
    """The config; variants: "offline", "debug"."""
    config = imagenet.imagenet(512)
    config.data.path = "data/imagenet/train512"
    config.total_steps = 4_000_000
    config.optim.clip_norm = 0.5
    config.flow.shift = 3.0
    config.sample.shift = 2.0
    config.sample.guidance = 3.5
    config.sample.guidance_interval = (0.1, 1.0)
    return variants.apply(config, variant)
