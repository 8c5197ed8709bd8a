"""AdamW and gradient clipping as the reference trains with them, on top of optax.

One parameter group: weight decay reaches every trainable tensor, norms and biases too. A skipped
update leaves parameters and Adam's moments and count untouched; the learning-rate schedule goes
on (so does the EMA, which the objective updates whatever happened here).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pid_jax.training.freezing import Tree, apply_mask


@dataclasses.dataclass(frozen=True)
class GradClip:
    """Clipping by global norm, with rules for gradients that are not finite.

    Attributes:
      max_norm: gradients are scaled by min(1, max_norm / (norm + 1e-6)); infinity: never.
      force_finite: first turn every nan and infinity into 0.
      skip_on_nonfinite: drop the update when the norm is still not finite. Without it an
        infinite norm makes all gradients 0.
      spike_threshold: also drop the update when the norm exceeds this.
    """

    max_norm: float = 0.1
    force_finite: bool = True
    skip_on_nonfinite: bool = True
    spike_threshold: float = math.inf

    def __call__(self, grads: Tree) -> tuple[Tree, jax.Array, jax.Array]:
        """Returns (clipped gradients, norm before clipping, bool: drop this update)."""
        if self.force_finite:
            grads = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0), grads)
        norm = global_norm(grads)
        skip = norm > self.spike_threshold
        if self.skip_on_nonfinite:
            skip |= ~jnp.isfinite(norm)
        if math.isfinite(self.max_norm):
            scale = jnp.minimum(1.0, self.max_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        return grads, norm, skip


def global_norm(tree: Tree) -> jax.Array:
    """L2 norm of all leaves together, summed in float32 (infinite where the squares overflow)."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.zeros(())))


class OptimizerState(NamedTuple):
    """Attributes: schedule_step, int32, updates tried so far; adam, optax's own state."""

    schedule_step: jax.Array
    adam: optax.OptState


@dataclasses.dataclass(frozen=True)
class AdamW:
    """The optimizer; a plain value without arrays of its own.

    Attributes:
      learning_rate: peak rate.
      multiplier: schedule, from the number of updates already tried to a factor.
      beta1, beta2, eps: Adam's; eps is added outside the square root.
      weight_decay: decoupled, times the current learning rate.
      clip: gradient clipping.
    """

    learning_rate: float
    multiplier: Callable[[jax.Array], jax.Array] = jnp.ones_like
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: GradClip = GradClip()

    def init(self, params: Tree) -> OptimizerState:
        """State for the trainable leaves `params` (see `freezing.partition`)."""
        return OptimizerState(jnp.zeros((), jnp.int32), self._transform().init(params))

    def update(self, grads: Tree, state: OptimizerState, params: Tree, mask: Tree | None = None
               ) -> tuple[Tree, OptimizerState, dict[str, jax.Array]]:
        """One update.

        Args:
          grads, params: trees of the same leaves as at `init`.
          mask: like `params`, True or bool arrays (`freezing.trainable_mask`): masked layers
            neither count in the norm nor move. None: everything trains.
        Returns:
          New parameters, new state, and float32 scalars `grad_norm` (before clipping),
          `learning_rate`, `update_skipped` (0 or 1).
        """
        mask = jax.tree.map(lambda _: True, params) if mask is None else mask
        grads, norm, skip = self.clip(apply_mask(grads, mask))
        rate = self.learning_rate * self.multiplier(state.schedule_step).astype(jnp.float32)
        steps, adam = self._transform().update(grads, state.adam, params)
        moved = optax.apply_updates(
            params, apply_mask(jax.tree.map(lambda step: -rate * step, steps), mask))
        params, adam = jax.tree.map(lambda old, new: jnp.where(skip, old, new),
                                    (params, state.adam), (moved, adam))
        metrics = {"grad_norm": norm, "learning_rate": rate,
                   "update_skipped": skip.astype(jnp.float32)}
        return params, OptimizerState(state.schedule_step + 1, adam), metrics

    def _transform(self) -> optax.GradientTransformation:
        return optax.chain(optax.scale_by_adam(self.beta1, self.beta2, self.eps),
                           optax.add_decayed_weights(self.weight_decay))


def accumulate(value_and_grad: Callable[..., tuple[Any, Tree]], params: Tree, batch: Tree,
               steps: int) -> tuple[Any, Tree]:
    """Averages values and gradients over `steps` equal parts of the batch, one after another.

    Args:
      value_and_grad: (params, part of the batch, int32 index of the part) -> (values, gradients);
        what it returns must be float arrays. The index belongs into the random keys.
      batch: tree of arrays [B, ...]; part k takes the samples k, k + steps, ..., so that a batch
        spread over devices stays spread.
      steps: must divide B.
    Returns:
      Means over the parts. Equal to the whole batch at once where the loss is a plain mean.
    """
    if steps == 1:
        return value_and_grad(params, batch, jnp.zeros((), jnp.int32))

    def part(index):
        rows = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(
            a.reshape(a.shape[0] // steps, steps, *a.shape[1:]), index, 1, keepdims=False), batch)
        return value_and_grad(params, rows, index)

    def add(total, index):
        return jax.tree.map(jnp.add, total, part(index)), None

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(part, 0))
    total, _ = jax.lax.scan(add, zeros, jnp.arange(steps))
    return jax.tree.map(lambda a: a / steps, total)
