"""Variants of the full-size experiments: `--config=configs/X.py:offline` or `:debug`."""

from ml_collections import ConfigDict

from configs.common import networks
from pid_jax.errors import UserError

VARIANTS = ("offline", "debug")


def check(variant: str) -> None:
    """Refuses a variant that no config has."""
    if variant not in ("", *VARIANTS):
        raise UserError(f"this config has no variant {variant!r}; it has "
                        f"{' and '.join(map(repr, VARIANTS))}")


def apply(config: ConfigDict, variant: str) -> ConfigDict:
    """The config as it is (""), or changed:

    * "offline": encoders without weights in the place of the real ones, for runs without any
      download. Their results are of no use. A PiD network reads the DCT codec's latents then; a
      class-conditional one is not aligned with features (REPA).
    * "debug": offline, and small enough for a CPU: 25 steps of a tiny network on the photographs
      of `python -m pid_jax.data.photos --dst runs/photos`, with samples every 10 steps. Of a
      class-conditional network on `python -m pid_jax.data.digits --dst runs/digits/data`.
    """
    check(variant)
    if variant:
        _offline(config)
    if variant == "debug":
        _debug(config)
    return config


def _offline(config: ConfigDict) -> None:
    if config.model.name == "pixeldit_c2i":
        config.codec = ConfigDict({"name": "dct"})
        config.repa.weight, config.model.repa_features = 0.0, 0
        return
    config.text = ConfigDict({"name": "hashed", "width": config.text.width,
                              "length": config.text.length})
    config.distill.untrained_teacher = True
    if config.model.name == "pidnet":
        config.codec = ConfigDict({"name": "dct"})
        config.model.update({"lq_latent_channels": 16, "latent_spatial_down_factor": 8,
                             "lq_latent_unpatchify_factor": 1})


def _debug(config: ConfigDict) -> None:
    config.model.update({name: value for name, value in networks.TINY.items()
                         if name in config.model})
    if config.model.name == "pidnet":
        config.model.update({"lq_hidden_dim": 32, "lq_num_res_blocks": 1})
    config.model.remat = "none"
    config.dtype = "float32"
    config.mesh.update({"data": 1, "fsdp": 1, "sequence": 1})
    config.data.update({"path": "runs/photos/train", "buckets": "square", "image_size": 64,
                        "resize": "random", "batch_size": 4})
    config.total_steps = 25
    config.optim.warm_up_steps = (5,)
    config.checkpoint.every = 10
    config.sample.update({"every": 10, "steps": 4, "count": 2, "image_size": 64,
                          "heldout": "runs/photos/heldout"})
    config.distill.discriminator.feature_indices = (1, 3)
    config.log.every = 5
    if config.model.name == "pixeldit_c2i":
        config.data.update({"path": "runs/digits/data", "image_size": 16, "resize": "fit"})
        config.sample.image_size = 16
        return
    config.text.update({"width": config.model.txt_embed_dim,
                        "length": config.model.txt_max_length})
