"""The thin Flax shell of the networks: a table of initialisers and a call."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pid_jax.models.quantised import is_quantised

Init = Callable[[jax.Array], Any]


class Shell(nn.Module):
    """A module whose parameters are the trees of `parameter_inits`, held in `self.weights`."""

    param_dtype: Any = jnp.float32

    def setup(self):
        self.weights = {name: self._parameter(name, init)
                        for name, init in self.parameter_inits().items()}

    def _parameter(self, name: str, init: Init) -> Any:
        # `self.param` compares shapes with those of `init`, leaf by leaf; 8-bit kernels have two.
        if is_quantised(held := self.get_variable("params", name)):
            return held
        return self.param(name, _cast(init, self.param_dtype))

    def parameter_inits(self) -> dict[str, Init]:
        """The parameter tree: top-level name -> initialiser of a PRNG key (float32 leaves)."""
        raise NotImplementedError

    def all_parameters(self) -> Mapping[str, Any]:
        """The parameters; `init(key, method="all_parameters")` makes them and runs no forward."""
        return self.variables["params"]


def _cast(init: Init, dtype: Any) -> Init:
    return lambda key: jax.tree.map(lambda leaf: leaf.astype(dtype), init(key))
