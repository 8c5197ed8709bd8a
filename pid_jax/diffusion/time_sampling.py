"""Which times a batch is trained at, and how times shift with the size of the picture.

Times are float32 in [0, 1] and 1 is noise. The functions of draws (`logit_normal`, `power`) are
pure so that the same draws give the same times anywhere.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.errors import UserError

DISTRIBUTIONS = ("logit_normal", "power", "beta")


def logit_normal(normal: jax.Array, mean: float = 0.0, std: float = 1.0) -> jax.Array:
    """sigmoid(mean + std z) for standard normal draws z (arXiv 2403.03206, section 3.1)."""
    return jax.nn.sigmoid(normal * std + mean)


def power(uniform: jax.Array, exponent: float) -> jax.Array:
    """u^(1/exponent) for uniform draws u: density exponent * t^(exponent - 1)."""
    return uniform ** (1.0 / exponent)


@dataclasses.dataclass(frozen=True)
class TimeSampler:
    """Draws training times.

    Attributes:
      distribution: "logit_normal" (mean, std), "power" (exponent) or "beta" (alpha, beta).
      minimum, maximum: every time is clipped to this range (distillation: 0.02, 0.99).
    """

    distribution: str = "logit_normal"
    mean: float = 0.0
    std: float = 1.0
    exponent: float = 2.0
    alpha: float = 1.0
    beta: float = 1.0
    minimum: float = 0.0
    maximum: float = 1.0

    def __post_init__(self):
        if self.distribution not in DISTRIBUTIONS:
            raise UserError(f"time distribution is {self.distribution!r}; "
                            f"use one of {', '.join(DISTRIBUTIONS)}")

    def __call__(self, rng: jax.Array, batch: int) -> jax.Array:
        """Float32 [batch] times."""
        return jnp.clip(self._draw(rng, batch), self.minimum, self.maximum)

    def _draw(self, rng: jax.Array, batch: int) -> jax.Array:
        if self.distribution == "logit_normal":
            return logit_normal(jax.random.normal(rng, (batch,)), self.mean, self.std)
        if self.distribution == "power":
            return power(jax.random.uniform(rng, (batch,)), self.exponent)
        return jax.random.beta(rng, self.alpha, self.beta, (batch,))


def dynamic_shift(height: int, width: int, base_shift: float, reference_size: int) -> float:
    """The shift for a picture of `height` x `width` pixels: base sqrt(sqrt(H W) / reference).

    Args:
      base_shift: the shift at a square picture of `reference_size` pixels a side.
    """
    return base_shift * math.sqrt(math.sqrt(height * width) / reference_size)


def shift_time(t, shift):
    """s t / (1 + (s - 1) t): moves times towards noise for s > 1; identity for s = 1.

    Works on numpy and JAX arrays and keeps their precision; 0 and 1 stay where they are.
    """
    return shift * t / (1.0 + (shift - 1.0) * t)


def discrete_table(steps: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Times of the original text-to-image recipe: t_i = shift_time(i / steps), i < steps.

    Returns:
      The times and the whole numbers that the network reads for them, floor(steps t), float32
      [steps] each. (Its samplers feed steps t itself.)
    """
    times = shift_time(np.arange(steps) / steps, float(shift))
    return times.astype(np.float32), np.floor((steps * times).astype(np.float32))
