"""DPM-Solver++ (2M) on the rectified-flow path (arXiv 2211.01095, algorithm 2).

With alpha = 1 - t, sigma = t and r = t'/t, a step from t to t' is exactly

    x' = r x + (1 - r) D,    D = d + 1/2 (h / h_prev) (d - d_prev),    d = predicted x0

where h is the step in log(alpha / sigma). Every coefficient is computed on the host in float64;
the device multiplies. Predictions enter as pictures directly (never through the noise, which at
the first step divides by alpha ~ 1e-3), so rounding stays at float32's own level.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.diffusion import flow, time_sampling
from pid_jax.diffusion.guidance import Predict
from pid_jax.errors import UserError

FIRST_TIME = 0.999
"""Unshifted time of the first step; 1 itself has no log signal-to-noise ratio."""

MOST_STEPS = 10_000
"""More is a typing mistake: no picture changes any further."""


class DpmTable(NamedTuple):
    """Host-made float32 coefficients of N steps; a pytree, so one compilation serves any shift.

    Attributes:
      times: [N + 1] in [0, 1], descending, last exactly 0.
      keep: [N] r, the weight of x.
      take: [N] 1 - r, the weight of D.
      correction: [N] h / (2 h_prev); 0 for first-order steps.
    """

    times: np.ndarray
    keep: np.ndarray
    take: np.ndarray
    correction: np.ndarray

    @property
    def steps(self) -> int:
        """N."""
        return len(self.keep)


def time_grid(num_steps: int, shift: float = 1.0) -> np.ndarray:
    """Float64 [num_steps + 1] times from just under 1 to exactly 0, uniform before the shift.

    Raises:
      UserError: `num_steps` outside 1 .. MOST_STEPS or `shift` not positive.
    """
    if not 1 <= num_steps <= MOST_STEPS:
        raise UserError(f"the sampler takes 1 to {MOST_STEPS} steps, got {num_steps}")
    if not shift > 0:
        raise UserError(f"the time shift must be positive, got {shift}")
    return time_sampling.shift_time(np.linspace(FIRST_TIME, 0.0, num_steps + 1), float(shift))


def make_table(num_steps: int, shift: float = 1.0, order: int = 2) -> DpmTable:
    """Coefficients of `num_steps` steps; first and last are first order whatever `order` says.

    Args:
      shift: time shift s of t' = s t / (1 + (s - 1) t).
      order: 1 (DDIM) or 2.
    """
    if order not in (1, 2):
        raise UserError(f"the solver's order is {order}; use 1 or 2")
    times = time_grid(num_steps, shift)
    keep = times[1:] / times[:-1]
    correction = _corrections(times) if order == 2 else np.zeros(num_steps)
    return DpmTable(*(a.astype(np.float32) for a in (times, keep, 1.0 - keep, correction)))


def _corrections(times: np.ndarray) -> np.ndarray:
    log_snr = np.log1p(-times[:-1]) - np.log(times[:-1])
    steps = np.diff(log_snr)
    corrections = np.zeros(len(times) - 1)
    corrections[1:-1] = 0.5 * steps[1:] / steps[:-1]
    return corrections


def solve(predict: Predict, noise: jax.Array, table: DpmTable,
          prediction: flow.Prediction = "velocity", return_states: bool = False) -> jax.Array:
    """Integrates from noise to a picture; the network is traced once whatever the step count.

    Args:
      predict: (already guided) network; gets t float32 [B] in [0, 1].
      noise: float32 [B, H, W, C], the state at the first time.
      table: from `make_table`.
      prediction: what `predict` returns.
      return_states: also keep every state.
    Returns:
      The final state, not clamped; with `return_states` all states [N + 1, B, H, W, C], from the
      noise to the final state.
    """
    flow.check_prediction(prediction)
    noise = noise.astype(jnp.float32)

    def step(carry, row):
        x, previous = carry
        t, keep, take, correction = row
        output = predict(x, jnp.full(x.shape[:1], t)).astype(jnp.float32)
        x0 = flow.predicted_x0(output, x, t, prediction)
        x = keep * x + take * (x0 + correction * (x0 - previous))
        return (x, x0), (x if return_states else None)

    rows = jax.tree.map(jnp.asarray, (table.times[:-1], *table[1:]))
    (final, _), states = jax.lax.scan(step, (noise, jnp.zeros_like(noise)), rows)
    return jnp.concatenate([noise[None], states]) if return_states else final
