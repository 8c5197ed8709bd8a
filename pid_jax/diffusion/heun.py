"""Euler and Heun with guidance in an interval of time, from noise (t = 0) to picture (t = 1).

Every network evaluation is one row of a table made on the host in float64: Heun's predictor and
corrector are two rows. The last step is always an Euler step (it ends where the velocity is not
defined). Guidance is on where interval[0] < t < interval[1], both strict, and from t = 0 on when
interval[0] is 0; elsewhere the scale is 1, and there the unconditional side is not evaluated:
Heun with 50 steps and scale 1 costs 99 evaluations. Source: JiT (arXiv 2511.13720) and its code.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.diffusion import guidance
from pid_jax.diffusion.dpm_solver import MOST_STEPS
from pid_jax.errors import UserError

METHODS = ("euler", "heun")

Velocity = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""`velocity(z [B, H, W, C], t [B], scale scalar) -> dz/dt [B, H, W, C]`."""


class EvaluationTable(NamedTuple):
    """Float32 [N], one entry for each evaluation v at the state z and time `times`:

    z <- base + step * (v + previous * (v_before - v)); where `ends` is 1 the base becomes z.
    """

    times: np.ndarray
    scales: np.ndarray
    step: np.ndarray
    previous: np.ndarray
    ends: np.ndarray

    @property
    def guided(self) -> bool:
        """Whether any evaluation has another scale than 1; a traced table may have some."""
        return not isinstance(self.scales, np.ndarray) or bool(np.any(self.scales != 1))


def time_grid(steps: int) -> np.ndarray:
    """Times float64 [steps + 1] from 0 to 1."""
    if not 1 <= steps <= MOST_STEPS:
        raise UserError(f"the sampler takes 1 to {MOST_STEPS} steps, got {steps}")
    return np.linspace(0.0, 1.0, steps + 1)


def guided_scale(t: float, scale: float, interval: tuple[float, float]) -> float:
    """The guidance scale at time t; a time that is a boundary in float32 lies outside."""
    t, low, high = map(np.float32, (t, *interval))
    return scale if t < high and (low == 0 or t > low) else 1.0


def make_table(steps: int, method: str, scale: float = 1.0,
               interval: tuple[float, float] = (0.0, 1.0)) -> EvaluationTable:
    """The evaluations of `steps` steps.

    Args:
      method: "euler" or "heun".
      scale: of the guidance; 1 for none.
      interval: times between which it is used.
    Raises:
      UserError: an unknown method, or steps or guidance out of range.
    """
    if method not in METHODS:
        raise UserError(f"the sampling method is {method!r}; choose one of {', '.join(METHODS)}")
    guidance.check_guidance(scale, interval)
    grid = time_grid(steps)
    rows = []
    for index, (now, after) in enumerate(zip(grid, grid[1:])):
        corrected = method == "heun" and index < steps - 1
        rows.append((now, guided_scale(now, scale, interval), after - now, 0.0, not corrected))
        if corrected:
            rows.append((after, guided_scale(after, scale, interval), after - now, 0.5, True))
    return EvaluationTable(*np.asarray(rows, np.float64).T.astype(np.float32))


def guided_in_interval(predict: Callable[[jax.Array, jax.Array, Any], jax.Array], condition: Any,
                       null_condition: Any, table: EvaluationTable) -> Velocity:
    """A velocity that evaluates the unconditional side only where the scale is not 1.

    Args:
      predict: network's velocity for (z, t, condition).
      condition, null_condition: pytrees of arrays [B, ...], the second also [1, ...].
      table: tells whether there is guidance at all.
    """
    plain = lambda z, t, scale: predict(z, t, condition)
    if not table.guided:
        return plain

    def guided(z, t, scale):
        return guidance.guided_by_one_call(predict, condition, null_condition, scale)(z, t)

    return lambda z, t, scale: jax.lax.cond(scale == 1, plain, guided, z, t, scale)


def solve(velocity: Velocity, noise: jax.Array, table: EvaluationTable,
          collect: bool = False) -> Any:
    """From noise [B, H, W, C] (already scaled) to pictures, not clipped.

    Args:
      collect: also return, for every evaluation, the state after it and its velocity.
    """

    def evaluate(carry, row):
        z, base, before = carry
        v = velocity(z, jnp.full(z.shape[:1], row.times), row.scales)
        z = base + row.step * (v + row.previous * (before - v))
        base = jnp.where(row.ends == 1, z, base)
        return (z, base, v), (z, v) if collect else None

    noise = noise.astype(jnp.float32)
    rows = jax.tree.map(jnp.asarray, table)
    (pictures, _, _), shown = jax.lax.scan(evaluate, (noise, noise, jnp.zeros_like(noise)), rows)
    return (pictures, *shown) if collect else pictures
