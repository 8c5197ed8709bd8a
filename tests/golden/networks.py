"""The network of a golden case, its parameters and the way back to torch names."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from pid_jax.models import build_model
from tests.golden.cases import Case
from tools.convert_torch_weights.mappings import Table, jax_to_torch, table_for, torch_to_jax

MODEL_OF_NET = {"PixDiT_T2I": "pixeldit_t2i", "PidNet": "pidnet"}


@dataclasses.dataclass(frozen=True)
class GoldenNet:
    """A network in this project's layouts."""

    net: nn.Module
    params: dict
    table: Table

    def __call__(self, params: dict, *args: Any, **kwargs: Any) -> Any:
        return self.net.apply({"params": params}, *args, **kwargs)

    def to_torch(self, tree: Any) -> dict[str, np.ndarray]:
        """Parameters, gradients or masks under torch names and in torch layouts."""
        return {key: np.asarray(value) for key, value in jax_to_torch(self.table, tree).items()}

    def mask_to_torch(self, mask: Any) -> dict[str, bool]:
        """Torch name -> whether the tensor trains, from a `freezing.trainable_mask`."""
        full = jax.tree.map(lambda leaf, keep: np.broadcast_to(keep, leaf.shape), self.params, mask)
        return {key: bool(value.all()) for key, value in self.to_torch(full).items()}


def load_network(case: Case, model: str = "", options: str = "config",
                 params: str = "params") -> GoldenNet:
    """The network that the case's JSON describes under the given keys."""
    model = model or MODEL_OF_NET[case.meta["net"]]
    table = table_for(model, case.meta[options])
    return GoldenNet(build_model(model, **case.meta[options]),
                     torch_to_jax(table, case.params(params)), table)
