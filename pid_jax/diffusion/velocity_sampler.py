"""Samplers of the class-conditional PixelDiT: from noise at t = 0 to a picture at t = 1.

    dx/dt = v(x, t),    v = clean picture - noise        (the other sign and direction of `flow`)

| sampler      | step from t to t + h                                        | network calls      |
|--------------|-------------------------------------------------------------|--------------------|
| `euler`      | x + h v, or one of the rules below                          | one a step         |
| `heun`       | mean of v here and at the Euler point; that second velocity | one a step and one |
|              | is the first of the next step                               |                    |
| `heun_exact` | the same with both velocities computed anew                 | two a step         |
| `flowdpm`    | x + h (3 v - v_prev) / 2, first step Euler: Adams-Bashforth | one a step         |

Rules of `euler` with the score s = (t v - x) / ((1-t)^2 + t (1-t)) and w = 1 - t:
`sde_mean` x + h (v + w s); `sde` adds sqrt(2 w h) noise to that; `sde_preserve` is
x + h (v + w s / 2) + sqrt(w h) noise. Every last step is a plain Euler step.

Under guidance a step calls the network on [unconditional, conditional], except where its time lies
outside the guidance interval.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.diffusion.dpm_solver import MOST_STEPS
from pid_jax.diffusion.guidance import ScaledPredict, check_guidance, scale_within
from pid_jax.errors import UserError

SAMPLERS = ("euler", "heun", "heun_exact", "flowdpm")
RULES = ("ode", "sde_mean", "sde", "sde_preserve")
NOISY_RULES = ("sde", "sde_preserve")


class SamplerTable(NamedTuple):
    """Host-made float32 numbers of N steps; a pytree, so one compilation serves any shift.

    Attributes:
      times: [N + 1], ascending from 0 to 1.
      scales: [N + 1], the guidance scale at every time.
    """

    times: np.ndarray
    scales: np.ndarray


def shift_towards_noise(t, shift):
    """t / (t + (1 - t) shift): times that count from noise (0) to clean (1), shifted to noise for
    shift > 1. Numpy and JAX arrays alike."""
    return t / (t + (1.0 - t) * shift)


def time_grid(steps: int, shift: float = 1.0, last_step: float | None = None) -> np.ndarray:
    """Float64 [steps + 1]: even from 0 to 1 - last_step (default 1 / steps), then 1; shifted."""
    if not 1 <= steps <= MOST_STEPS:
        raise UserError(f"the sampler takes 1 to {MOST_STEPS} steps, got {steps}")
    if not shift > 0:
        raise UserError(f"the time shift must be positive, got {shift}")
    last_step = 1.0 / steps if last_step is None else last_step
    if not 0 < last_step <= 1:
        raise UserError(f"the last step must be above 0 and at most 1, got {last_step}")
    even = np.append(np.linspace(0.0, 1.0 - last_step, steps), 1.0)
    return shift_towards_noise(even, float(shift))


def make_table(steps: int, scale: float, shift: float = 1.0, last_step: float | None = None,
               interval: tuple[float, float] = (0.0, 1.0)) -> SamplerTable:
    """The table of a sampler.

    Args:
      scale: guidance scale; 1 for none.
      interval: guidance acts where low < t < high, strictly, t after the shift; so never at t = 0.
    """
    check_guidance(scale, interval)
    times = time_grid(steps, shift, last_step).astype(np.float32)
    return SamplerTable(times, np.asarray(scale_within(times, scale, interval), np.float32))


def sample(velocity: ScaledPredict, noise: jax.Array, table: SamplerTable,
           sampler: str = "flowdpm", rule: str = "ode",
           step_noise: Callable[[jax.Array], jax.Array] | None = None,
           return_states: bool = False) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Integrates from noise to a picture; the network is traced a fixed number of times.

    Args:
      velocity: from `guidance.guided_where_scaled`.
      noise: float32 [B, H, W, 3], standard normal.
      table: from `make_table`.
      sampler, rule: see the table of this module; rules other than "ode" are of `euler`.
      step_noise: step index -> standard normal like `noise`, for the rules "sde*" that draw.
      return_states: also return every state after a step, and the velocity that made it.
    Returns:
      The picture, not clamped; with `return_states` (states, velocities), [N, B, H, W, 3] each.
    """
    check_rule(sampler, rule, step_noise)
    steps = len(table.times) - 1
    step = {"euler": _euler, "flowdpm": _adams_bashforth}.get(sampler, _heun)

    def body(carry, row):
        x, memory, used = step(velocity, carry, row)
        if sampler == "euler" and rule != "ode":
            x = jnp.where(row.last, x, _stochastic(rule, carry[0], used, row, step_noise))
        return (x, memory), ((x, used) if return_states else None)

    index = np.arange(steps)
    fresh = np.full(steps, True) if sampler == "heun_exact" else index == 0
    rows = _Row(index, table.times[:-1], table.times[1:], table.scales[:-1], table.scales[1:],
                fresh, index == steps - 1)
    start = noise.astype(jnp.float32)
    (final, _), states = jax.lax.scan(body, (start, jnp.zeros_like(start)),
                                      jax.tree.map(jnp.asarray, rows))
    return states if return_states else final


def check_rule(sampler: str, rule: str, step_noise: Any = True) -> None:
    """Raises UserError for names that are unknown or do not go together."""
    for name, value, known in (("sampler", sampler, SAMPLERS), ("rule", rule, RULES)):
        if value not in known:
            raise UserError(f"{name} is {value!r}; use one of {', '.join(known)}")
    if rule != "ode" and sampler != "euler":
        raise UserError(f"the rule {rule!r} belongs to the sampler 'euler', not to {sampler!r}")
    if rule in NOISY_RULES and step_noise is None:
        raise UserError(f"the rule {rule!r} draws noise at every step, and none was given")


class _Row(NamedTuple):
    """One step: its index, times and scales at both ends, and whether it starts afresh or ends."""

    index: jax.Array
    t: jax.Array
    t_next: jax.Array
    scale: jax.Array
    scale_next: jax.Array
    fresh: jax.Array
    last: jax.Array


def _euler(velocity, carry, row):
    x, memory = carry
    v = velocity(x, row.t, row.scale)
    return x + (row.t_next - row.t) * v, memory, v


def _adams_bashforth(velocity, carry, row):
    x, previous = carry
    v = velocity(x, row.t, row.scale)
    used = jnp.where(row.fresh, v, 1.5 * v - 0.5 * previous)
    return x + (row.t_next - row.t) * used, v, v


def _heun(velocity, carry, row):
    x, cached = carry
    step = row.t_next - row.t
    v = jax.lax.cond(row.fresh, lambda: velocity(x, row.t, row.scale), lambda: cached)
    ahead = jax.lax.cond(
        row.last, lambda: v, lambda: velocity(x + step * v, row.t_next, row.scale_next))
    used = 0.5 * (v + ahead)
    return x + step * used, ahead, used


def _stochastic(rule, x, v, row, step_noise):
    step, w = row.t_next - row.t, 1.0 - row.t
    score = (row.t * v - x) / (w * w + row.t * w)
    drift, spread = {"sde_mean": (1.0, 0.0), "sde": (1.0, 2.0), "sde_preserve": (0.5, 1.0)}[rule]
    moved = x + step * (v + drift * w * score)
    return moved if not spread else moved + jnp.sqrt(spread * w * step) * step_noise(row.index)
