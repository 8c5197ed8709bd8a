"""How each model's parameters are named and laid out in PyTorch: one table per model.

A new model is a file here that ends with its `Network`, and its line in `NETWORKS`.
"""

from typing import Any

import jax

from pid_jax.models import init_parameters
from pid_jax.registry import unknown
from tools.convert_torch_weights.mappings import (discriminator, ditok, jit, pidnet,
                                                  pixeldit_c2i, pixeldit_t2i, titok)
from tools.convert_torch_weights.mappings.engine import (Table, jax_to_torch, make_table,
                                                         torch_to_jax)
from tools.convert_torch_weights.mappings.network import Network

__all__ = ["NETWORKS", "Network", "Table", "convertible_networks", "jax_to_torch",
           "table_for", "torch_to_jax"]

# By name. Weights are of the first network whose signature they hold.
NETWORKS: dict[str, Network] = {network.name: network for network in (
    pidnet.NETWORK,
    ditok.NETWORK,
    jit.NETWORK,
    pixeldit_c2i.NETWORK,
    pixeldit_t2i.NETWORK,
    discriminator.NETWORK,
    titok.NETWORK,
)}


def table_for(name: str, options: dict[str, Any]) -> Table:
    """The table of the network `name` with `options`; allocates no parameters.

    Raises:
      UserError: no table of that name, or options that the network does not take.
    """
    convertible = convertible_networks()
    if name not in convertible:
        raise unknown("model with a table", name, convertible)
    net = NETWORKS[name].build(name, **options)
    abstract = jax.eval_shape(lambda key: init_parameters(net, key), jax.random.key(0))
    return make_table(name, NETWORKS[name].rules(net), abstract, NETWORKS[name].constants(net))


def convertible_networks() -> list[str]:
    """Names of the networks that have a table."""
    return sorted(name for name, network in NETWORKS.items() if network.rules)
