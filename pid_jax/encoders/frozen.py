"""What every encoder with weights shares: parameters that are read once, when first needed."""

import abc
import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pid_jax.errors import UserError
from pid_jax.models.layers import Params

DTYPES = ("float32", "bfloat16")


class Frozen(abc.ABC):
    """Holds parameters that never train.

    The parameters are arguments of the jitted functions of a subclass. Inside another jitted
    function they would become constants of its program; `with_params` lets that function take them
    as an argument of its own.
    """

    def __init__(self, read: Callable[[], Params]):
        """Args: read: gives the parameters, as numpy arrays: a trace may be under way."""
        self._read = read
        self._params: Params | None = None
        self._given = False
        self._placed: dict[jax.sharding.Sharding, Params] = {}

    @abc.abstractmethod
    def shapes(self) -> Params:
        """Shapes and dtypes of the parameters, without reading them."""

    @property
    def params(self) -> Params:
        """The parameters; read at the first call. Raises: UserError when that is not possible."""
        if self._params is None:
            self._params = self._read()
        return self._params

    def load(self) -> None:
        """Reads what is needed now, so that nothing can be missing later."""
        self.params  # noqa: B018

    def placed(self, sharding: jax.sharding.Sharding) -> Params:
        """The parameters on devices; all who ask for one sharding share them."""
        if sharding not in self._placed:
            with jax.ensure_compile_time_eval():  # kept, so it must not belong to a trace
                self._placed[sharding] = jax.device_put(self.params, sharding)
        return self._placed[sharding]

    def release(self) -> None:
        """Frees the parameters; they are read again when they are next needed."""
        for params in self._placed.values():
            jax.tree.map(lambda leaf: leaf.delete(), params)
        self._placed, self._params = {}, None

    @property
    def arrays(self) -> Params:
        """The parameters on this process's first device, or those that `with_params` gave."""
        if self._given:
            return self._params
        return self.placed(jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))

    def with_params(self, params: Params) -> Any:
        """This encoder with other parameters."""
        other = copy.copy(self)
        other._params, other._given = params, True
        return other


def check_dtype(dtype: str) -> jnp.dtype:
    """The dtype called `dtype`; UserError unless it is one of DTYPES."""
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    return jnp.dtype(dtype)
