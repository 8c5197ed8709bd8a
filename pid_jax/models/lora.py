"""Low-rank adapters (LoRA, arXiv 2106.09685) on chosen kernels of any network.

    W + scale * alpha / rank * down up          down [..., in, rank], up [..., rank, out]

`up` starts at zero, so a fresh adapter changes nothing. Adapters stand beside the network's own
parameters under `lora/`, by the path of their kernel; stacked and fused kernels [depth, 3, in, out]
have stacked adapters.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from pid_jax.errors import UserError

ADAPTERS = "lora"


@dataclasses.dataclass(frozen=True)
class Lora:
    """Attributes: rank of the adapters; alpha, numerator of their scale; targets, regular
    expressions of which one must be found in a kernel's path."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def chosen(self, params: dict) -> dict[str, Any]:
        """The targeted kernels by path.

        Raises:
          UserError: a target matches nothing, or something that is no kernel.
        """
        leaves = traverse_util.flatten_dict(params, sep="/")
        found = {}
        for target in self.targets:
            matched = {path: leaf for path, leaf in leaves.items() if re.search(target, path)}
            if not matched:
                raise UserError(f"config.lora.targets: {target!r} matches no parameter; the paths "
                                f"look like {next(iter(leaves))!r}")
            for path, leaf in matched.items():
                if len(leaf.shape) < 2 or not path.endswith("kernel"):
                    raise UserError(f"config.lora.targets: {target!r} matches {path} of shape "
                                    f"{tuple(leaf.shape)}, which is no matrix; name kernels only")
            found |= matched
        return found

    def init(self, key: jax.Array, params: dict) -> dict:
        """Fresh adapters for the targeted kernels of `params`."""
        adapters = {}
        for number, (path, kernel) in enumerate(sorted(self.chosen(params).items())):
            *stack, n_in, n_out = kernel.shape
            bound = 1.0 / math.sqrt(n_in)
            down = jax.random.uniform(jax.random.fold_in(key, number), (*stack, n_in, self.rank),
                                      kernel.dtype, -bound, bound)
            parent = path.removesuffix("/kernel")
            adapters[f"{parent}/down/kernel"] = down
            adapters[f"{parent}/up/kernel"] = jnp.zeros((*stack, self.rank, n_out), kernel.dtype)
        return traverse_util.unflatten_dict(adapters, sep="/")

    def fold(self, params: dict, scale: float = 1.0) -> dict:
        """The network's own parameters with the adapters added, `scale` times as strong.

        Args:
          params: with adapters under `lora`.
          scale: 0 is the network without them.
        """
        own = traverse_util.flatten_dict(without_adapters(params), sep="/")
        adapters = traverse_util.flatten_dict(params[ADAPTERS], sep="/")
        for path, down in adapters.items():
            if path.endswith("/down/kernel"):
                parent = path.removesuffix("/down/kernel")
                change = jnp.matmul(down, adapters[f"{parent}/up/kernel"],
                                    precision=jax.lax.Precision.HIGHEST)
                kernel = own[f"{parent}/kernel"]
                change = (scale * self.scale * change).astype(kernel.dtype)
                own[f"{parent}/kernel"] = kernel + change
        return traverse_util.unflatten_dict(own, sep="/")


def without_adapters(params: dict) -> dict:
    """The network's own parameters."""
    return {name: tree for name, tree in params.items() if name != ADAPTERS}


@dataclasses.dataclass(frozen=True)
class AdaptedNet:
    """A network whose parameters hold adapters; options and calls are the network's own."""

    net: Any
    lora: Lora

    def __getattr__(self, name: str) -> Any:
        return getattr(self.net, name)

    def clone(self, **options: Any) -> "AdaptedNet":
        """The network with other options and the same adapters."""
        return dataclasses.replace(self, net=self.net.clone(**options))

    def init(self, key: jax.Array, method: str) -> dict:
        """The network's parameters and fresh adapters."""
        params = self.net.init(key, method=method)["params"]
        return {"params": {**params, ADAPTERS: self.lora.init(jax.random.fold_in(key, 1), params)}}

    def apply(self, variables: dict, *args: Any, **kwargs: Any) -> Any:
        """The network's `apply`, with the adapters, where there are any, added to its kernels."""
        params = variables["params"]
        if ADAPTERS in params:
            params = self.lora.fold(params)
        return self.net.apply({"params": params}, *args, **kwargs)
