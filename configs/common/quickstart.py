"""The base of the quick starts: photographs of scikit-image, minutes on two CPU cores."""

from ml_collections import ConfigDict

from pid_jax.config import base_config


def quickstart() -> ConfigDict:
    """Float32, 128 px, encoders without weights. Make the data with `pid_jax.data.photos`."""
    config = base_config()
    config.text = ConfigDict({"name": "hashed", "width": 64, "length": 16})
    config.data.path = "runs/photos/train"
    config.data.image_size = 128
    config.data.batch_size = 4
    config.data.crop = "random"
    config.data.flip = True
    config.optim.warm_up_steps = (50,)
    config.flow.shift = 1.0
    config.total_steps = 600
    config.checkpoint.every = 200
    config.sample.every = 200
    config.sample.steps = 20
    config.sample.heldout = "runs/photos/heldout"
    return config
