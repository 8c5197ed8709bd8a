"""Numbers that follow the training step: EMA weights, learning-rate multipliers, ramps.

Every function takes the step as a Python or numpy number (computed in float64) or as a traced
array (float32), by one formula.
"""

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.errors import UserError

DECAYS = ("linear", "cosine", "cosine_throughout")


def _arrays_for(step: Any) -> ModuleType:
    return jnp if isinstance(step, jax.Array) else np


def _as_float(step: Any):
    return step.astype(jnp.float32) if isinstance(step, jax.Array) else np.asarray(step, np.float64)


def ema_exponent(rate: float) -> float:
    """Exponent of the power-function EMA whose relative width is `rate` (0.1 gives 6.94).

    The largest real root of x^3 + 7 x^2 + (16 - rate^-2) x + (12 - rate^-2); arXiv 2312.02696,
    equation 126.
    """
    if not 0.0 < rate < 12.0**-0.5:
        raise UserError(f"the EMA rate is {rate}; use a number between 0 and 0.288, such as 0.1")
    roots = np.roots([1.0, 7.0, 16.0 - rate**-2, 12.0 - rate**-2])
    return float(roots[np.abs(roots.imag) < 1e-9].real.max())


def ema_new_weight(iteration, exponent: float, iteration_shift: int = 0):
    """Weight 1 - beta of the new parameters in the power-function EMA.

    beta = (1 - 1/(i + 1))^(exponent + 1). As 1 - beta, small numbers keep their digits in
    float32, which the beta of a long run (0.99992) does not.

    Args:
      iteration: 0-based index of the finished update; i = iteration + iteration_shift.
    Returns:
      Float in (0, 1]; exactly 1 for i <= 0, so that the first update copies.
    """
    xp, i = _arrays_for(iteration), _as_float(iteration) + iteration_shift
    weight = -xp.expm1((exponent + 1.0) * xp.log1p(-1.0 / (xp.maximum(i, 1.0) + 1.0)))
    return xp.where(i > 0, weight, 1.0)


def student_phase(iteration, frequency: int):
    """Distillation alternates: (is this a student update, how many of those came before).

    One student update opens every `frequency` iterations; the others train the fake score.
    """
    return iteration % frequency == 0, iteration // frequency


def linear_ramp(iteration, length: int):
    """min(1, iteration / length); 1 throughout for length 0."""
    if length <= 0:
        return _as_float(iteration) * 0.0 + 1.0
    return _arrays_for(iteration).minimum(1.0, _as_float(iteration) / length)


@dataclasses.dataclass(frozen=True)
class CycleSchedule:
    """Learning-rate multiplier: in each cycle a linear warm-up, then a decay.

    Attributes (one entry per cycle, all tuples of one length):
      warm_up_steps: steps from `f_start` to `f_max`.
      cycle_lengths: steps of the whole cycle. A step on a boundary belongs to the earlier cycle;
        after the last cycle its final value holds.
      f_start, f_max, f_min: multipliers at the start, after the warm-up and at the end.
      decay: "linear" or "cosine" from `f_max` to `f_min` after the warm-up, or
        "cosine_throughout": the cosine spans the whole cycle, and the warm-up multiplies it.
    """

    warm_up_steps: tuple[int, ...] = (2000,)
    cycle_lengths: tuple[int, ...] = (10_000_000,)
    f_start: tuple[float, ...] = (1e-6,)
    f_max: tuple[float, ...] = (1.0,)
    f_min: tuple[float, ...] = (1.0,)
    decay: str = "linear"

    def __post_init__(self):
        lengths = {len(getattr(self, f.name)) for f in dataclasses.fields(self)
                   if f.name != "decay"}
        if len(lengths) != 1 or 0 in lengths:
            raise UserError("a learning-rate schedule needs the same number (at least one) of "
                            "warm_up_steps, cycle_lengths, f_start, f_max and f_min")
        if self.decay not in DECAYS:
            raise UserError(f"learning-rate decay is {self.decay!r}; use one of "
                            f"{', '.join(DECAYS)}")
        if any(warm >= whole for warm, whole in zip(self.warm_up_steps, self.cycle_lengths)):
            raise UserError(f"warm_up_steps {self.warm_up_steps} must be shorter than "
                            f"cycle_lengths {self.cycle_lengths}")

    def __call__(self, step):
        """Multiplier for the update after `step` earlier ones (so the first uses `f_start`)."""
        xp, n = _arrays_for(step), _as_float(step)
        ends = np.cumsum(np.asarray(self.cycle_lengths, np.float64))
        cycle = xp.minimum(xp.searchsorted(ends, n), len(ends) - 1)
        pick = lambda values: xp.asarray(values, n.dtype)[cycle]
        warm, length = pick(self.warm_up_steps), pick(self.cycle_lengths)
        start, top, low = pick(self.f_start), pick(self.f_max), pick(self.f_min)
        within = xp.minimum(n - pick(ends - np.asarray(self.cycle_lengths)), length)
        if self.decay == "cosine_throughout":
            ramp = xp.where(within < warm, within / xp.maximum(warm, 1e-9), 1.0)
            curve = low + (top - low) * (0.5 + 0.5 * xp.cos(np.pi * within / length))
            return (start + (1.0 - start) * ramp) * curve
        rising = start + (top - start) * within / xp.maximum(warm, 1.0)
        fraction = (within - warm) / (length - warm)
        if self.decay == "cosine":
            fraction = 0.5 - 0.5 * xp.cos(np.pi * fraction)
        return xp.where(within < warm, rising, top + (low - top) * fraction)
