"""The straight path of JiT, in JiT's own direction: t = 0 is noise, t = 1 is the clean picture.

    z_t = t x + (1 - t) e,   e = noise_scale * N(0, 1)
    v   = (x - z_t) / max(1 - t, t_eps)

The network predicts x; its velocity is made by the same division, so the loss on velocities
weighs an error of the picture by 1 / max(1 - t, t_eps)^2 (arXiv 2511.13720, table 1: x-prediction,
v-loss). Arrays are float32 [B, H, W, C], times float32 [B] in [0, 1].
"""

import jax
import jax.numpy as jnp

from pid_jax.diffusion.flow import per_sample


def times_of(normal: jax.Array, mean: float, std: float) -> jax.Array:
    """Training times sigmoid(mean + std * normal), float32 in (0, 1)."""
    return jax.nn.sigmoid(mean + std * normal)


def noised(x: jax.Array, noise: jax.Array, t, noise_scale: float = 1.0) -> jax.Array:
    """z_t of clean pictures x and standard normal noise."""
    t = per_sample(t, x)
    return t * x + (1.0 - t) * noise_scale * noise


def velocity(x: jax.Array, z: jax.Array, t, t_eps: float) -> jax.Array:
    """(x - z) / max(1 - t, t_eps): from the state z towards the (true or predicted) picture x."""
    return (x - z) / jnp.maximum(1.0 - per_sample(t, z), t_eps)


def drop_labels(labels: jax.Array, uniform: jax.Array, probability: float,
                null: int) -> jax.Array:
    """Labels int [B] with `null` where uniform [B] in [0, 1) is below the probability."""
    return jnp.where(uniform < probability, null, labels)
