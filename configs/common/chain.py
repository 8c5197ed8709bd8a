"""The quick-start chain: the three stages of PiD on one tiny network and twelve photographs."""

from ml_collections import ConfigDict

from configs import quickstart_pid
from configs.common import networks

GUIDANCE = 1.5


def stage(steps: int) -> ConfigDict:
    """Data, codec, text and network of `quickstart_pid`, with a length and a rate of its own."""
    config = quickstart_pid.get_config()
    config.flow.shift = 3.0  # the student asks for times that a larger shift hardly trains
    config.optim.cycle_lengths = (steps,)
    config.total_steps = steps
    config.checkpoint.every = steps
    config.sample.every = steps
    config.sample.count = 3
    config.sample.guidance = GUIDANCE
    config.log.every = 50
    return config


def backbone(model: ConfigDict) -> ConfigDict:
    """The text-to-image network whose weights are the backbone of a PiD network."""
    shared = networks.pixeldit_t2i().keys() - {"name"}
    return ConfigDict(networks.pixeldit_t2i(**{name: model[name] for name in shared}))
