"""Noise on the low-quality latent, so that the network learns to decode imperfect ones.

Per sample: with probability `apply_prob` (and not kept clean by `clean_ratio`) a sigma is drawn
uniformly and noise is mixed in. Sigma 0 marks an untouched latent. Ranges that depend on where a
sample comes from are resolved on the host (`sigma_ranges`); the rest is pure and jit-safe.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.diffusion.flow import per_sample
from pid_jax.errors import UserError

PATHS = ("flow", "vp")


@dataclasses.dataclass(frozen=True)
class SigmaOverride:
    """Sigma range of the samples whose source contains `substring` (an empty one matches none)."""

    substring: str
    sigma_min: float
    sigma_max: float


class NoiserDraws(NamedTuple):
    """Everything random: uniform [B] in [0, 1) for applying, keeping clean and sigma; noise."""

    apply: jax.Array
    clean: jax.Array
    sigma: jax.Array
    noise: jax.Array


@dataclasses.dataclass(frozen=True)
class LatentNoiser:
    """How latents are noised; hashable, so it may be a static argument.

    Attributes:
      apply_prob: chance that a sample is considered for noise.
      clean_ratio: chance that a considered sample is left clean after all.
      sigma_min, sigma_max: uniform range of sigma where no override matches.
      path: "flow", (1 - s) x + s n, or "vp", sqrt(1 - s^2) x + s n.
      overrides: the first one whose substring occurs in the source wins.
    """

    apply_prob: float = 0.75
    clean_ratio: float = 0.0
    sigma_min: float = 0.0
    sigma_max: float = 0.8
    path: str = "flow"
    overrides: tuple[SigmaOverride, ...] = ()

    def __post_init__(self):
        if self.path not in PATHS:
            raise UserError(f"noising path is {self.path!r}; use one of {', '.join(PATHS)}")
        for low, high in [(self.sigma_min, self.sigma_max),
                          *((o.sigma_min, o.sigma_max) for o in self.overrides)]:
            if not 0.0 <= low <= high <= 1.0:
                raise UserError(f"sigma range {low}..{high} must lie within 0..1, lower end first")

    def sigma_ranges(self, sources: str | Sequence[str] | None, batch: int) -> np.ndarray:
        """Float32 [batch, 2] sigma ranges; on the host.

        Args:
          sources: where each sample comes from; one string stands for all; None: no override.
        """
        names = [sources or ""] * batch if sources is None or isinstance(sources, str) else sources
        if len(names) != batch:
            raise UserError(f"{len(names)} sources for a batch of {batch}")
        return np.asarray([self._range_of(name) for name in names], np.float32)

    def _range_of(self, source: str) -> tuple[float, float]:
        for override in self.overrides:
            if override.substring and override.substring in source:
                return override.sigma_min, override.sigma_max
        return self.sigma_min, self.sigma_max

    def apply(self, latent: jax.Array, ranges: jax.Array, draws: NoiserDraws
              ) -> tuple[jax.Array, jax.Array]:
        """Noises float32 [B, h, w, C] latents.

        Args:
          ranges: float32 [B, 2] from `sigma_ranges`.
        Returns:
          The latents (untouched where sigma is 0) and sigma float32 [B].
        """
        chosen = (draws.apply < self.apply_prob) & ~(draws.clean < self.clean_ratio)
        low, high = ranges[:, 0], ranges[:, 1]
        sigma = jnp.where(chosen, low + (high - low) * draws.sigma, 0.0)
        noised = self.mix(latent, draws.noise, sigma)
        return jnp.where(per_sample(chosen, latent) > 0, noised, latent), sigma

    def mix(self, latent: jax.Array, noise: jax.Array, sigma: jax.Array) -> jax.Array:
        """Latents [B, h, w, C] at the noise levels sigma [B], along this noiser's path."""
        sigma = per_sample(sigma, latent)
        if self.path == "flow":
            return (1.0 - sigma) * latent + sigma * noise
        return jnp.sqrt(jnp.maximum(1.0 - sigma * sigma, 0.0)) * latent + sigma * noise


def draw(rng: jax.Array, latent_shape: Sequence[int]) -> NoiserDraws:
    """All draws for one batch of latents [B, h, w, C]."""
    apply_key, clean_key, sigma_key, noise_key = jax.random.split(rng, 4)
    batch = latent_shape[:1]
    return NoiserDraws(jax.random.uniform(apply_key, batch), jax.random.uniform(clean_key, batch),
                       jax.random.uniform(sigma_key, batch),
                       jax.random.normal(noise_key, tuple(latent_shape)))
