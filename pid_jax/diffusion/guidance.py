"""Classifier-free guidance (arXiv 2207.12598) around networks.

A guided network is again a `predict(x, t) -> output`, for velocities and pictures alike: both are
affine in the noise prediction with the same coefficients, so guiding either is the same.
The scale is a Python number or a scalar array (then one compilation serves every scale). Only the
Python number 1 skips the unconditional side.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.errors import UserError

Predict = Callable[[jax.Array, jax.Array], jax.Array]
"""`predict(x float32 [B, H, W, C], t float32 [B] in [0, 1]) -> output [B, H, W, C]`."""

ScaledPredict = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""`predict(x float32 [B, H, W, C], t scalar, guidance scale scalar) -> output [B, H, W, C]`."""


def guide(unconditional: jax.Array, conditional: jax.Array, scale) -> jax.Array:
    """unconditional + scale (conditional - unconditional)."""
    return unconditional + scale * (conditional - unconditional)


def guided_by_two_calls(conditional: Predict, unconditional: Predict, scale) -> Predict:
    """Guidance with one network call for each side: half the memory of a doubled batch."""
    if _is_one(scale):
        return conditional
    return lambda x, t: guide(unconditional(x, t), conditional(x, t), scale)


def guided_by_one_call(predict: Callable[[jax.Array, jax.Array, Any], jax.Array],
                       condition: Any, null_condition: Any, scale) -> Predict:
    """Guidance with one network call on the doubled batch [unconditional, conditional].

    Args:
      predict: network that takes (x, t, condition).
      condition: pytree of arrays [B, ...].
      null_condition: the same pytree with [B, ...] or [1, ...] arrays.
    """
    if _is_one(scale):
        return lambda x, t: predict(x, t, condition)
    both = jax.tree.map(_stack_null_first, null_condition, condition)

    def guided(x, t):
        output = predict(jnp.concatenate([x, x]), jnp.concatenate([t, t]), both)
        return guide(*jnp.split(output, 2), scale)

    return guided


def guided_where_scaled(predict: Callable[[jax.Array, jax.Array, Any], jax.Array],
                        condition: jax.Array, null_condition: jax.Array) -> ScaledPredict:
    """Guidance whose scale changes from step to step; at scale 1 the unconditional half is skipped.

    Args: as `guided_by_one_call`, single arrays.
    """
    both = _stack_null_first(null_condition, condition)

    def guided(x, t, scale):
        times = jnp.full(len(x), t)

        def with_guidance(x):
            output = predict(jnp.concatenate([x, x]), jnp.concatenate([times, times]), both)
            return guide(*jnp.split(output, 2), scale)

        return jax.lax.cond(scale == 1.0, lambda x: predict(x, times, condition), with_guidance, x)

    return guided


def check_guidance(scale: float, interval: tuple[float, float]) -> None:
    """Raises UserError for a scale that is not finite, or an interval outside [0, 1]."""
    if not np.isfinite(scale):
        raise UserError(f"the guidance scale is {scale}; expected a finite number, 1 for none")
    if len(interval) != 2 or not 0 <= interval[0] <= interval[1] <= 1:
        raise UserError(f"the guidance interval is {interval}; expected two rising times in 0..1")


def scale_within(t, scale, interval: tuple[float, float]):
    """`scale` where low < t < high, strictly and in float32, and 1 elsewhere (arXiv 2404.07724)."""
    low, high = np.float32(interval[0]), np.float32(interval[1])
    xp = jnp if isinstance(t, jax.Array) else np
    return xp.where((low < t) & (t < high), scale, 1.0)


def _is_one(scale) -> bool:
    return isinstance(scale, (int, float)) and scale == 1


def _stack_null_first(null: jax.Array, condition: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.broadcast_to(null, condition.shape), condition])
