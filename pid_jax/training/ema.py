"""Exponential moving averages of the parameters: several at once, by name, in float32."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from pid_jax.diffusion import schedules
from pid_jax.errors import UserError
from pid_jax.training.freezing import Tree

KINDS = ("power", "constant")


@dataclasses.dataclass(frozen=True)
class EmaSpec:
    """One average.

    Attributes:
      name: key of the average in the state and of its metrics and samples.
      kind: "power" (relative width `rate`, see `schedules.ema_exponent`) or "constant" (`decay`).
      rate: for "power".
      decay: beta of "constant": ema <- beta ema + (1 - beta) params.
      iteration_shift: added to the iteration ("power"); a negative one copies for longer.
    """

    name: str = "ema"
    kind: str = "power"
    rate: float = 0.1
    decay: float = 0.9999
    iteration_shift: int = 0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise UserError(f"EMA {self.name!r} has kind {self.kind!r}; use 'power' or 'constant'")
        if not 0.0 <= self.decay <= 1.0:
            raise UserError(f"EMA {self.name!r} has decay {self.decay}; use a number in 0..1")
        if self.kind == "power":
            schedules.ema_exponent(self.rate)  # refuses a rate that no average has

    def new_weight(self, iteration):
        """Weight 1 - beta of the newest parameters after update `iteration` (0-based)."""
        if self.kind == "constant":
            return 1.0 - self.decay
        exponent = schedules.ema_exponent(self.rate)
        return schedules.ema_new_weight(iteration, exponent, self.iteration_shift)


def check_names(specs: Sequence[EmaSpec]) -> None:
    """Refuses two averages of one name with a `UserError`."""
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise UserError(f"EMA names must differ, got {', '.join(names)}")


def init_ema(params: Tree, specs: Sequence[EmaSpec]) -> dict[str, Tree]:
    """Float32 copies of `params` (never the same buffers), one per spec."""
    check_names(specs)
    return {spec.name: jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)
            for spec in specs}


def update_ema(ema: Mapping[str, Tree], params: Tree, iteration, specs: Sequence[EmaSpec]
               ) -> dict[str, Tree]:
    """All averages after an update.

    Args:
      ema: from `init_ema`.
      params: parameters after the update. The average of a frozen leaf is the leaf itself, so a
        tree of the trainable leaves alone gives the same numbers.
      iteration: 0-based index of the finished update (distillation: student updates only).
    """
    return {spec.name: _blend(ema[spec.name], params, spec.new_weight(iteration))
            for spec in specs}


def _blend(average: Tree, params: Tree, weight) -> Tree:
    """average + weight (params - average); with weight 1 exactly the parameters."""
    def blend(old, new):
        new = new.astype(jnp.float32)
        return jnp.where(weight < 1.0, old + weight * (new - old), new)

    return jax.tree.map(blend, average, params)
