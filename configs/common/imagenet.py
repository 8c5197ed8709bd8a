"""What the ImageNet trainings of PixelDiT share (arXiv 2511.20645, section 4 and its release)."""

from ml_collections import ConfigDict

from configs.common import networks
from pid_jax.config import base_config

CLASSES = ("207", "360", "387", "974", "88", "979", "417", "279")  # those of DiT's sheets


def imagenet(size: int, **network) -> ConfigDict:
    """XL at `size` pixels: constant learning rate, EMA 0.9999, label drop 0.1, REPA, no flips.

    Args:
      network: options of the network that change.
    """
    config = base_config()
    config.objective = "pixeldit_c2i"
    config.model = ConfigDict(networks.pixeldit_c2i("xl", remat="full", repa_features=768,
                                                         **network))
    config.dtype = "bfloat16"
    config.data.path = "data/imagenet/train"
    config.data.image_size = size
    config.data.batch_size = 256
    config.data.caption_fields = ("label",)
    config.data.caption_dropout = 0.1
    config.optim.lr = 1e-4
    config.optim.f_start = (1.0,)
    config.ema.decay = 0.9999
    config.ema.others = (("ema_0.9998", "constant", 0.9998), ("ema_0.9996", "constant", 0.9996))
    config.repa.block = 8
    config.repa.weight = 0.5
    config.codec = ConfigDict({"name": "dinov2"})
    config.checkpoint.every = 10_000
    config.sample.every = 10_000
    config.sample.steps = 100
    config.sample.count = len(CLASSES)
    config.sample.prompts = CLASSES
    return config
