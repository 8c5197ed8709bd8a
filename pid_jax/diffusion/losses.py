"""Losses beside the flow loss: LQ alignment, distillation, GAN, R1, REPA. All in float32.

Images are [B, H, W, C] in [-1, 1], logits [B, K], tokens [B, L, D]; every loss is a scalar.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.diffusion import resampling
from pid_jax.diffusion.flow import Prediction, check_prediction, per_sample
from pid_jax.errors import UserError

YCBCR = np.asarray([[0.299, 0.587, 0.114],
                    [-0.168736, -0.331264, 0.5],
                    [0.5, -0.418688, -0.081312]], np.float32)
"""Rows: luma and the two chroma differences of RGB (JPEG's full-range matrix, no offset)."""


def mean_squared_error(prediction: jax.Array, target: jax.Array) -> jax.Array:
    """Mean of squared differences over all elements."""
    return jnp.mean(jnp.square(prediction.astype(jnp.float32) - target.astype(jnp.float32)))


# LQ alignment


@dataclasses.dataclass(frozen=True)
class AlignLoss:
    """Charbonnier distance in luma and chroma between a predicted and the true LQ image.

    Attributes:
      sigma_power: samples weigh max(1 - sigma, 0)^power; with 0 every sigma weighs 1.
      y_weight, chroma_weight: factors on the differences, before squaring.
      eps: width of the quadratic zone.
    """

    sigma_power: float = 1.0
    y_weight: float = 0.25
    chroma_weight: float = 1.0
    eps: float = 1e-3

    def __call__(self, prediction: jax.Array, target: jax.Array, sigma: jax.Array | None = None,
                 keep: jax.Array | None = None) -> jax.Array:
        """Weighted mean of `distances` over the samples that count; 0 when none does.

        Args:
          prediction: [B, h, w, 3], not clamped.
          target: [B, H, W, 3].
          sigma, keep: see `weights`.
        """
        target = self._fit(target, prediction.shape)
        weights = self.weights(target, sigma, keep)
        return jnp.sum(shares(weights) * self.distances(prediction, target))

    def distances(self, prediction: jax.Array, target: jax.Array) -> jax.Array:
        """Float32 [B] mean Charbonnier distances.

        The target [B, H, W, 3] is resized by area to the prediction's h x w, then clamped to
        [-1, 1]; the prediction is not clamped.
        """
        channels = np.float32([self.y_weight, self.chroma_weight, self.chroma_weight])
        # (x + 1) / 2 on both sides leaves half the difference.
        half = 0.5 * (prediction.astype(jnp.float32) - self._fit(target, prediction.shape))
        difference = jnp.einsum("bhwc,kc->bhwk", half, channels[:, None] * YCBCR,
                                precision=jax.lax.Precision.HIGHEST)
        return jnp.mean(jnp.sqrt(jnp.square(difference) + self.eps**2) - self.eps, axis=(1, 2, 3))

    def weights(self, target: jax.Array, sigma: jax.Array | None = None,
                keep: jax.Array | None = None) -> jax.Array:
        """Float32 [B] weights of the samples.

        Args:
          target: [B, H, W, 3]; an all-zero one weighs nothing.
          sigma: [B] noise level of the LQ latent; None: every sample weighs 1.
          keep: [B], 0 or False where the latent was dropped.
        """
        weight = (jnp.mean(jnp.abs(target), axis=(1, 2, 3)) > 1e-6).astype(jnp.float32)
        if keep is not None:
            weight = weight * keep.astype(jnp.float32)
        if sigma is not None:
            weight = weight * jnp.maximum(1.0 - sigma, 0.0) ** self.sigma_power
        return weight

    def _fit(self, target: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        target = target.astype(jnp.float32)
        if target.shape[1:3] != shape[1:3]:
            target = resampling.resize(target, *shape[1:3], resampling.adaptive_mean_matrix)
        return jnp.clip(target, -1.0, 1.0)


def shares(weights: jax.Array) -> jax.Array:
    """Weights [B] over their sum: each sample's share in a weighted mean; all 0 when none counts.

    Made once for a whole batch, they let micro-batches add up to the batch's weighted mean.
    """
    return weights / jnp.maximum(jnp.sum(weights), 1e-6)


def latent_is_kept(latent: jax.Array) -> jax.Array:
    """Bool [B]: the latent [B, h, w, C] was not dropped, that is, has any nonzero element."""
    return jnp.any(latent != 0, axis=tuple(range(1, latent.ndim)))


# Distribution matching


def vsd_direction(generated: jax.Array, teacher_x0: jax.Array, fake_x0: jax.Array) -> jax.Array:
    """Gradient that moves generated pictures from the fake score's towards the teacher's.

    (fake - teacher) / (mean |generated - teacher| + 1e-6) per sample; entries that are not finite
    become 0. Source: DMD2 (arXiv 2405.14867), equation 7 of DMD (arXiv 2311.18828).
    """
    generated, teacher_x0, fake_x0 = (
        a.astype(jnp.float32) for a in (generated, teacher_x0, fake_x0))
    scale = 1.0 / (_sample_mean(jnp.abs(generated - teacher_x0)) + 1e-6)
    direction = (fake_x0 - teacher_x0) * per_sample(scale, generated)
    return jnp.where(jnp.isfinite(direction), direction, 0.0)


def vsd_loss(generated: jax.Array, teacher_x0: jax.Array, fake_x0: jax.Array) -> jax.Array:
    """Half the mean square of `vsd_direction`; its gradient is direction / element count.

    The textbook form mean (G - stop(G - g))^2 / 2 loses g in float32 where g is small beside G
    (the reference uses float64). Here value and gradient are put together without a difference.
    Gradients reach `generated` only.
    """
    direction = jax.lax.stop_gradient(vsd_direction(generated, teacher_x0, fake_x0))
    carrier = generated.astype(jnp.float32)
    carrier = carrier - jax.lax.stop_gradient(carrier)
    return 0.5 * jnp.mean(jnp.square(direction)) + jnp.mean(direction * carrier)


def _sample_mean(values: jax.Array) -> jax.Array:
    """[B] means of [B, H, ...], row by row first so that long sums keep their digits."""
    rows = jnp.mean(values, axis=tuple(range(2, values.ndim)))
    return jnp.mean(rows, axis=1)


def dsm_target(generated: jax.Array, noise: jax.Array, prediction: Prediction) -> jax.Array:
    """What the fake score learns to output on noised student pictures."""
    check_prediction(prediction)
    return noise - generated if prediction == "velocity" else generated


# Adversarial


def gan_generator_loss(fake_logits: jax.Array) -> jax.Array:
    """mean softplus(-D(fake))."""
    return jnp.mean(jax.nn.softplus(-fake_logits.astype(jnp.float32)))


def gan_discriminator_loss(real_logits: jax.Array, fake_logits: jax.Array) -> jax.Array:
    """mean softplus(D(fake)) + mean softplus(-D(real))."""
    return (jnp.mean(jax.nn.softplus(fake_logits.astype(jnp.float32)))
            + jnp.mean(jax.nn.softplus(-real_logits.astype(jnp.float32))))


def r1_penalty(real_logits: jax.Array, perturbed_logits: jax.Array) -> jax.Array:
    """Finite-difference R1: mean square of D(x) - D(x + alpha n), gradients through both.

    Source: arXiv 2501.08316, section 3.3.
    """
    return mean_squared_error(real_logits, perturbed_logits)


# Representation alignment


def repa_loss(tokens: jax.Array, features: jax.Array) -> jax.Array:
    """1 - mean cosine similarity of projected tokens and frozen features (arXiv 2410.06940).

    Args:
      tokens: [B, L, D] hidden tokens after the projection head.
      features: [B, M, D]. When L and M differ both must be squares; the larger grid is resized
        to the smaller one (bilinear).
    """
    tokens, features = tokens.astype(jnp.float32), features.astype(jnp.float32)
    count = min(tokens.shape[1], features.shape[1])
    tokens, features = _resize_tokens(tokens, count), _resize_tokens(features, count)
    return 1.0 - jnp.mean(jnp.sum(unit(tokens) * unit(features), axis=-1))


def alignment_loss(tokens: jax.Array, features: jax.Array) -> jax.Array:
    """1 - mean cosine similarity, the tokens brought to the grid of the features.

    As the class-conditional PixelDiT aligns: means over areas where the features are fewer,
    bilinear where they are more. `repa_loss` is the rule of the text-to-image networks.

    Args:
      tokens: [B, L, D] hidden tokens after the projection head.
      features: [B, M, D]; L and M are squares when they differ.
    """
    tokens = fit_tokens(tokens.astype(jnp.float32), features.shape[1])
    return 1.0 - jnp.mean(jnp.sum(unit(tokens) * unit(features.astype(jnp.float32)), axis=-1))


def fit_tokens(tokens: jax.Array, count: int) -> jax.Array:
    """Square grids of tokens [B, L, D] -> [B, count, D]: area means to shrink, bilinear to grow."""
    fewer = count < tokens.shape[1]
    return _resize_tokens(tokens, count, resampling.adaptive_mean_matrix if fewer else
                          resampling.bilinear_matrix)


def unit(tokens: jax.Array) -> jax.Array:
    """L2-normalised on the last axis, norms below 1e-12 counted as 1e-12."""
    square = jnp.sum(jnp.square(tokens), axis=-1, keepdims=True)
    return tokens * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


def _resize_tokens(tokens: jax.Array, count: int,
                   matrix: resampling.Matrix = resampling.bilinear_matrix) -> jax.Array:
    batch, length, width = tokens.shape
    if length == count:
        return tokens
    side, new_side = math.isqrt(length), math.isqrt(count)
    if side * side != length or new_side * new_side != count:
        raise UserError(f"{length} and {count} tokens differ and are not both square grids; "
                        "feed the encoder an image with as many patches as the network has")
    grid = tokens.reshape(batch, side, side, width)
    grid = resampling.resize(grid, new_side, new_side, matrix)
    return grid.reshape(batch, count, width)
