"""Class-conditional PixelDiT-XL on ImageNet at 256 pixels (published: FID 1.61 at 320 epochs).

Paper: PixelDiT, arXiv 2511.20645. Values: the released recipe (docs/imagenet.md).

    python -m pid_jax.data.ingest --src ILSVRC2012/train --dst data/imagenet/train \
        --labels folders --center-crop 256
    python -m pid_jax.main --config=configs/pixeldit_imagenet256.py --workdir=DIR \
        --config.codec.weights=DINOV2

After 160 epochs the paper goes on with `--config.optim.lr=1e-5 --config.optim.clip_norm=0.5`: the
same command with these, in the same workdir, takes them over.
Hardware: parameters, AdamW and three averages take 19 GB over the `fsdp` axis; the release trained
on 8 GPUs. Expect (published, 50,000 pictures, FlowDPM, 100 steps): 80 epochs FID 2.36, 160 1.97,
320 1.61.
Variants: `:offline` needs no teacher's weights, `:debug` runs in minutes on a CPU
(configs/README.md).
"""

from ml_collections import ConfigDict

from configs.common import imagenet, variants


def get_config(variant: str = "") -> ConfigDict:
    """The config; variants: "offline", "debug"."""
    config = imagenet.imagenet(256)
    config.total_steps = 1_600_000  # 320 epochs
    config.optim.clip_norm = 1.0
    config.flow.shift = 1.0
    config.sample.guidance = 2.75
    config.sample.guidance_interval = (0.1, 0.9)
    return variants.apply(config, variant)
