"""The training state: everything that changes from one update to the next."""

from typing import Any

import jax
from flax import struct

Params = dict[str, Any]


@struct.dataclass
class TrainState:
    """Frozen; a step returns a new one. It holds no random keys: see `step_key`."""

    step: jax.Array
    """int32 scalar: updates done."""
    params: Params
    """Nested dict of parameters, `param_dtype`."""
    opt_state: Any
    """The optimizer's moments and counters, for trainable parameters only."""
    ema: dict[str, Params]
    """Averages of the parameters by name (`ema`); empty when switched off."""
    companions: dict[str, Params] = struct.field(default_factory=dict)
    """Other networks that train, by name; pictures are drawn with `params` alone."""
    frozen: dict[str, Params] = struct.field(default_factory=dict)
    """Networks that never change, by name; checkpoints hold a reference to their source."""


def step_key(seed: int, step: jax.Array | int) -> jax.Array:
    """The random key of one update: a pure function of seed and step, so a resume continues it."""
    return jax.random.fold_in(jax.random.key(seed), step)
