"""What is compiled ahead of time, and whether the memory table names all that it takes."""

import math

import jax
import numpy as np
import pytest

from configs import pid_teacher_flux_2k, pixeldit_imagenet256, pixeldit_t2i_2k
from configs.common import networks
from pid_jax.ahead_of_time import programs
from pid_jax.parallel.mesh import single_device
from pid_jax.parallel.sharding import bytes_per_device


def small(config):
    """A full-size config with a tiny network; encoders stay as they are."""
    config.model.update({name: value for name, value in networks.TINY.items()
                         if name in config.model and not name.startswith("txt_")})
    if "lq_hidden_dim" in config.model:
        config.model.lq_hidden_dim = 32
    if config.repa.weight:
        config.repa.block = 1
    config.model.remat, config.data.batch_size = "none", 2
    return config


@pytest.mark.parametrize("module", [pid_teacher_flux_2k, pixeldit_imagenet256, pixeldit_t2i_2k])
def test_parts_are_all_that_a_training_step_takes(module):
    built = programs.build(small(module.get_config()), single_device(), "train", 256, 256)
    taken = jax.tree.leaves(built.function.lower(*built.arguments).args_info)
    size = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in taken)
    assert sum(bytes_per_device(tree) for tree in built.parts.values()) == size
    assert bool(bytes_per_device(built.parts["encoder"])) == (module is not pixeldit_t2i_2k)
