"""Sampler of the distilled student: one step, a deterministic (ODE) or stochastic (SDE) loop.

Every step is affine in the state x, the network's output o and fresh noise e:

    x' = a x + b o + c e

The reference converts pictures to velocities and back in float64. Here the coefficients absorb
the conversions: they are made on the host in float64, and the device needs no extra precision.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.diffusion import flow
from pid_jax.diffusion.guidance import Predict
from pid_jax.errors import UserError

Kind = Literal["ode", "sde"]
Draw = Callable[[jax.Array], jax.Array]
"""`draw(step int32 scalar) -> noise [B, H, W, C]` of that step."""


class StepTable(NamedTuple):
    """Float32 [N] coefficients of x' = state x + output o + fresh e, and the times [N] of o.

    `fresh` is None where no step draws noise (the ODE).
    """

    times: np.ndarray
    state: np.ndarray
    output: np.ndarray
    fresh: np.ndarray | None

    @property
    def steps(self) -> int:
        """N."""
        return len(self.times)


def student_times(num_steps: int, t_list: Sequence[float] = (), trained_steps: int = 4,
                  first_time: float = 1.0) -> np.ndarray:
    """Float32 [num_steps + 1] times of the student, the last one 0.

    Args:
      num_steps: steps to take.
      t_list: times that the student was trained at, `trained_steps` + 1 of them; sub-sampled
        (indices rounded half to even) when `num_steps` differs. Empty: a uniform grid.
      first_time: start of the uniform grid.
    """
    if num_steps < 1:
        raise UserError(f"the student sampler needs at least 1 step, got {num_steps}")
    if not len(t_list):
        return np.linspace(first_time, 0.0, num_steps + 1).astype(np.float32)
    times = np.asarray(t_list, np.float32)
    if num_steps == trained_steps:
        return times
    return times[np.round(np.linspace(0, len(times) - 1, num_steps + 1)).astype(int)]


def sampling_times(num_steps: int, t_list: Sequence[float] = (), trained_steps: int = 4,
                   first_time: float = 1.0) -> np.ndarray:
    """The times that sampling uses: a single step starts at `first_time`, not at `t_list`'s."""
    if num_steps == 1:
        return np.asarray([first_time, 0.0], np.float32)
    return student_times(num_steps, t_list, trained_steps, first_time)


def make_table(times: Sequence[float], prediction: flow.Prediction, kind: Kind) -> StepTable:
    """Coefficients for the steps between consecutive `times` (descending, in [0, 1]).

    The last step returns the predicted picture itself, whatever the last time.
    """
    flow.check_prediction(prediction)
    if kind not in ("ode", "sde"):
        raise UserError(f"the student sampler is {kind!r}; use 'ode' or 'sde'")
    times = np.asarray(times, np.float64)
    if times.ndim != 1 or len(times) < 2 or np.any(np.diff(times) > 0) or times[0] > 1:
        raise UserError(f"times must fall from at most 1 to 0, got {times.tolist()}")
    now, after = times[:-1], times[1:]
    weights = _ode_weights(now, after, prediction)
    fresh = None
    if kind == "sde":
        weights = (1.0 - after) * _x0_weights(now, prediction)
        fresh = np.append(after[:-1], 0.0).astype(np.float32)
    weights[:, -1] = _x0_weights(now, prediction)[:, -1]
    return StepTable(*np.vstack([now, weights]).astype(np.float32), fresh)


def _x0_weights(now: np.ndarray, prediction: flow.Prediction) -> np.ndarray:
    """[2, N] weights of state and output in the predicted picture."""
    one, zero = np.ones_like(now), np.zeros_like(now)
    return np.stack([one, -now] if prediction == "velocity" else [zero, one])


def _ode_weights(now: np.ndarray, after: np.ndarray, prediction: flow.Prediction) -> np.ndarray:
    """[2, N] weights of state and output in x + (t' - t) v."""
    if prediction == "velocity":
        return np.stack([np.ones_like(now), after - now])
    ratio = (after - now) / np.maximum(now, flow.SMALLEST_TIME)
    return np.stack([1.0 + ratio, -ratio])


def gaussian_draws(rng: jax.Array, shape: Sequence[int]) -> Draw:
    """Standard normal noise of step i from `fold_in(rng, i)`: never more than one step stored."""
    return lambda step: jax.random.normal(jax.random.fold_in(rng, step), tuple(shape))


def sample(predict: Predict, noise: jax.Array, table: StepTable, draw: Draw | None = None
           ) -> jax.Array:
    """Runs the student from noise to a picture; the network is traced once.

    Args:
      predict: the student; gets t float32 [B] in [0, 1].
      noise: float32 [B, H, W, C].
      table: from `make_table`, which knows prediction and kind.
      draw: fresh noise of each step; needed for the SDE only.
    Returns:
      The picture, not clamped.
    Raises:
      UserError: the table asks for fresh noise and `draw` is None.
    """
    if table.fresh is not None and draw is None:
        raise UserError("the stochastic student sampler draws fresh noise: pass `draw`")

    def step(x, row):
        index, now = row
        output = predict(x, jnp.full(x.shape[:1], now.times))
        return advance(x, output, now, index, draw), None

    rows = (jnp.arange(len(table.times)), jax.tree.map(jnp.asarray, table))
    return jax.lax.scan(step, noise.astype(jnp.float32), rows)[0]


def advance(x: jax.Array, output: jax.Array, row: StepTable, index: jax.Array,
            draw: Draw | None = None) -> jax.Array:
    """One step: the state after `output`, by the scalar coefficients in `row`.

    Args:
      row: a `StepTable` of scalars (one row of a table).
      index: int32 scalar, the step, handed to `draw`.
    """
    x = row.state * x + row.output * output.astype(jnp.float32)
    return x if row.fresh is None else x + row.fresh * draw(index)
