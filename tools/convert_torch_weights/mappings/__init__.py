"""How each model's parameters are named and laid out in PyTorch: one table per model."""

from collections.abc import Callable
from typing import Any

import jax

from pid_jax.models import build_model, init_parameters
from tools.convert_torch_weights.mappings import discriminator, pidnet, pixeldit_t2i
from tools.convert_torch_weights.mappings.engine import (Rule, Table, jax_to_torch, make_table,
                                                         torch_to_jax)

__all__ = ["Table", "jax_to_torch", "table_for", "torch_to_jax"]

# Model name -> rules of a network with its options filled in.
RULES: dict[str, Callable[[Any], list[Rule]]] = {
    "pixeldit_t2i": pixeldit_t2i.rules, "pidnet": pidnet.rules,
    "discriminator": discriminator.rules}


def table_for(name: str, options: dict[str, Any]) -> Table:
    """The table of the network `build_model(name, **options)`; allocates no parameters."""
    net = build_model(name, **options)
    abstract = jax.eval_shape(lambda key: init_parameters(net, key), jax.random.key(0))
    return make_table(name, RULES[name](net), abstract)
