"""The decoder as one pure function of arrays: weights, noise, latents, captions -> pictures."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.diffusion import few_step
from pid_jax.inference import PixelDecoder
from pid_jax.models.attention import softmax_attention
from pid_jax.parallel.kernels import DENSE_SCORES, chunked
from pid_jax.parallel.mesh import single_device
from pid_jax.parallel.sequence import make_attention
from pid_jax.sampling_inputs import SamplerSettings, sampler_settings
from pid_jax.training.checkpoint import flat, like

Arrays = Mapping[str, Any]
Program = Callable[[Arrays, Arrays], jax.Array]


@dataclasses.dataclass(frozen=True)
class DecoderProgram:
    """A sampler with its steps, guidance and negative prompt inside.

    Attributes:
      call: (weights by path, inputs by name) -> pictures float32 [B, H, W, 3] in [-1, 1].
      weights: arrays by their path in the parameters.
      inputs: shape of each float32 input for one picture, without the batch axis.
      settings: the sampler's steps, guidance and negative prompt.
    """

    call: Program
    weights: Arrays
    inputs: Mapping[str, tuple[int, ...]]
    settings: SamplerSettings

    def input_shapes(self, batch: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """The inputs of a batch, whose size may be symbolic."""
        return {name: jax.ShapeDtypeStruct((batch, *shape), jnp.float32)
                for name, shape in self.inputs.items()}

    def random_inputs(self, batch: int, seed: int = 0) -> dict[str, np.ndarray]:
        """Normal inputs, with noise levels that rise from 0 to 0.5."""
        rng = np.random.default_rng(seed)
        drawn = {name: rng.standard_normal((batch, *shape)).astype(np.float32)
                 for name, shape in self.inputs.items()}
        return drawn | {"sigma": np.linspace(0, 0.5, batch, dtype=np.float32)}


def decoder_program(decoder: PixelDecoder, height: int, width: int, steps: int | None = None,
                    guidance: float | None = None, negative_prompt: str | None = None,
                    dtype: str | None = None) -> DecoderProgram:
    """What `decoder.decode` computes, for pictures of one size.

    The inputs are `noise` [H, W, 3], `latent` [h, w, C], `text` [T, E] and `sigma` [], and for a
    stochastic sampler of several steps its `fresh` noise [steps - 1, H, W, 3].

    Args:
      steps, guidance, negative_prompt: default to those of the run's samples.
      dtype: of the arithmetic; default: the run's.
    Raises:
      UserError: a size or option that the network cannot take.
    """
    objective = decoder.objective
    objective.check_picture(height, width)
    settings = sampler_settings(objective, height, width, steps, guidance, negative_prompt)
    table = _without_idle_noise(settings.table)
    objective = copy.copy(objective)
    objective.net = objective.net.clone(attention=make_attention(single_device(), plain_attention),
                                        dtype=jnp.dtype(dtype or objective.net.dtype))
    _, shapes = objective.drawing(1, height, width)
    inputs = {name: tuple(shape.shape[1:]) for name, shape in shapes.items()}
    if getattr(table, "fresh", None) is not None:
        inputs["fresh"] = (table.steps - 1, height, width, 3)
    params = decoder.checkpoint.params

    def fresh(step: jax.Array, noise: jax.Array) -> jax.Array:
        # The last step's weight of its noise is 0, and there is none.
        step = jnp.minimum(step, noise.shape[1] - 1)
        return jax.lax.dynamic_index_in_dim(noise, step, 1, keepdims=False)

    def call(weights: Arrays, inputs: Arrays) -> jax.Array:
        return objective.decode(
            like(params, weights), inputs["noise"], inputs["latent"], inputs["sigma"],
            inputs["text"], settings.null_text, table, settings.guidance,
            lambda step: fresh(step, inputs["fresh"]))

    return DecoderProgram(call, flat(params), inputs, settings)


def _without_idle_noise(table: Any) -> Any:
    """A stochastic table of one step draws no noise at all."""
    if isinstance(table, few_step.StepTable) and table.fresh is not None and table.steps == 1:
        return table._replace(fresh=None)
    return table


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array,
                    key_mask: jax.Array | None = None) -> jax.Array:
    """A kernel of plain products, which every platform compiles: dense, or in chunks of queries.

    The choice looks at one picture, so that the batch may be of any size.
    """
    scores = q.shape[2] * q.shape[1] * k.shape[1]
    return (softmax_attention if scores <= DENSE_SCORES else chunked)(q, k, v, key_mask)
