"""The rectified-flow path between a picture (t = 0) and Gaussian noise (t = 1).

    x_t = (1 - t) x0 + (s + t (1 - s)) n          s = sigma_min
    dx_t/dt = (1 - s) n - x0                       the velocity

One sign everywhere: a velocity points from the picture to the noise, and a network with
`prediction="velocity"` outputs it directly. The reference trainer negates the network and its
target, the reference sampler does not; squares being equal, both are this.
A network with `prediction="x0"` outputs the clean picture.

Arrays are float32 [B, H, W, C] (any rank works); `t` is a scalar or float32 [B] in [0, 1].
Paper: PiD (arXiv 2605.23902), rectified flow as in arXiv 2209.03003.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pid_jax.errors import UserError

Prediction = Literal["velocity", "x0"]

NETWORK_TIME_SCALE = 1000.0
"""Networks read times in 0..1000."""

SMALLEST_TIME = 0.05
"""Divisor floor where a velocity is made from a predicted picture."""


def check_prediction(prediction: str) -> None:
    """Refuses anything but "velocity" and "x0" with a `UserError`."""
    if prediction not in ("velocity", "x0"):
        raise UserError(f"prediction is {prediction!r}; use 'velocity' or 'x0'")


def per_sample(value, like: jax.Array) -> jax.Array:
    """Reshapes [B] (or a scalar) to float32 [B, 1, ..., 1] that broadcasts over `like`."""
    value = jnp.asarray(value, jnp.float32)
    return value.reshape(value.shape + (1,) * (like.ndim - value.ndim))


def network_time(t) -> jax.Array:
    """Time in the units that networks read: 1000 t, multiplied in float32."""
    return NETWORK_TIME_SCALE * jnp.asarray(t, jnp.float32)


def interpolate(x0: jax.Array, noise: jax.Array, t, sigma_min: float = 0.0) -> jax.Array:
    """The noised picture x_t; `sigma_min` is the noise left at t = 0."""
    t = per_sample(t, x0)
    return (1.0 - t) * x0 + (sigma_min + t * (1.0 - sigma_min)) * noise


def velocity_target(x0: jax.Array, noise: jax.Array, sigma_min: float = 0.0) -> jax.Array:
    """The velocity of the straight path, (1 - sigma_min) noise - x0."""
    return (1.0 - sigma_min) * noise - x0


def velocity_from_x0(x0: jax.Array, x_t: jax.Array, t) -> jax.Array:
    """(x_t - x0) / max(t, 0.05): the velocity that a predicted picture stands for."""
    return (x_t - x0) / jnp.maximum(per_sample(t, x_t), SMALLEST_TIME)


def x0_from_velocity(velocity: jax.Array, x_t: jax.Array, t) -> jax.Array:
    """x_t - t velocity, without any clamp."""
    return x_t - per_sample(t, x_t) * velocity


def predicted_velocity(output: jax.Array, x_t: jax.Array, t, prediction: Prediction) -> jax.Array:
    """The velocity in a network's output of either kind."""
    check_prediction(prediction)
    return output if prediction == "velocity" else velocity_from_x0(output, x_t, t)


def predicted_x0(output: jax.Array, x_t: jax.Array, t, prediction: Prediction) -> jax.Array:
    """The clean picture in a network's output of either kind."""
    check_prediction(prediction)
    return x0_from_velocity(output, x_t, t) if prediction == "velocity" else output


def euler_step(x: jax.Array, velocity: jax.Array, t, t_next) -> jax.Array:
    """x + (t_next - t) velocity."""
    return x + per_sample(jnp.subtract(t_next, t), x) * velocity


def flow_loss(output: jax.Array, x_t: jax.Array, x0: jax.Array, noise: jax.Array, t,
              prediction: Prediction = "velocity", sigma_min: float = 0.0) -> jax.Array:
    """Mean squared error between predicted and true velocity over all elements (float32 scalar).

    Args:
      output: the network's answer to (x_t, t); with "x0" it is divided by max(t, 0.05).
    """
    output = output.astype(jnp.float32)
    error = predicted_velocity(output, x_t, t, prediction) - velocity_target(x0, noise, sigma_min)
    return jnp.mean(jnp.square(error))
