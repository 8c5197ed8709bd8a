"""Text-to-image PixelDiT: rectified flow on pixels with captions (arXiv 2511.20645).

| here                    | paper                                            |
|-------------------------|--------------------------------------------------|
| `examples`              | x_t = (1 - t) x0 + t n, t logit-normal, shifted  |
| `loss`                  | mean |v - (n - x0)|^2, minus weight * REPA's cosine |
| `draw`                  | DPM-Solver++ 2M with classifier-free guidance    |
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.diffusion import dpm_solver, flow, guidance, losses, time_sampling
from pid_jax.encoders.protocols import LatentCodec, TextEncoder
from pid_jax.encoders.repa_teacher import teacher_tokens
from pid_jax.models import repa
from pid_jax.objectives.base import Batch, Metrics, Objective, float_shape
from pid_jax.training.state import Params


class PixelDitT2I(Objective):
    """Learns to draw pictures from captions.

    A batch holds `image` float32 [B, H, W, 3] in [-1, 1] and `text` float32 [B, T, E]; examples
    add `noise` [B, H, W, 3], `t` [B], with `flow.time_steps` the whole-numbered `network_time` [B],
    and with REPA the frozen `features` [B, L, D].
    """

    fresh_parameters = (rf"^{repa.NAME}/",)

    def __init__(self, config: Any, net: Any, text: TextEncoder,
                 codec: LatentCodec | None = None):
        """Holds the pieces; `codec` makes the features of REPA where config.repa.weight > 0."""
        super().__init__(config, net, text)
        self.codec = codec

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """`image` and `text` of a pipeline's batch; caption dropout has been done there."""
        return {"image": batch["image"], "text": self.prompts(batch["caption"])}

    def examples(self, batch: Batch, rng: jax.Array) -> Batch:
        """Adds noise, time and the features of REPA."""
        image, steps = batch["image"], self.config.flow.time_steps
        time_key, noise_key = jax.random.split(rng)
        found = {**batch, "noise": jax.random.normal(noise_key, image.shape)}
        if self.config.repa.weight:
            found["features"] = teacher_tokens(self.codec, image)
        if not steps:
            return found | {"t": self.draw_times(time_key, *image.shape[:3])}
        flow_options = self.config.flow
        draws = time_sampling.logit_normal(jax.random.normal(time_key, (len(image),)),
                                           flow_options.logit_mean, flow_options.logit_std)
        return found | self.discrete_times((draws * steps).astype(jnp.int32), *image.shape[1:3])

    def discrete_times(self, index: jax.Array, height: int, width: int) -> Batch:
        """`t` and `network_time`, [B] each, of entries of the recipe's table of times."""
        times, network_times = time_sampling.discrete_table(
            self.config.flow.time_steps, self.shift(height, width))
        return {"t": jnp.asarray(times)[index], "network_time": jnp.asarray(network_times)[index]}

    def loss(self, params: Params, examples: Batch) -> tuple[jax.Array, Metrics]:
        """The flow loss, weighted (see `flow.flow_loss`), and the weighted alignment."""
        options, weight = self.config.flow, self.config.repa.weight
        x0, noise, t = examples["image"], examples["noise"], examples["t"]
        x_t = flow.interpolate(x0, noise, t, options.sigma_min)
        network_time = examples.get("network_time", flow.network_time(t))
        taps = (self.config.repa.block - 1,) if weight else ()
        out = self.net.apply({"params": params}, x_t, network_time, examples["text"],
                             feature_indices=taps)
        value = flow.flow_loss(out.x, x_t, x0, noise, t, options.prediction_type,
                               options.sigma_min)
        total = options.loss_weight * value
        if not weight:
            return total, {"loss": total}
        tokens = out.features[0].reshape(len(x0), -1, out.features[0].shape[-1])
        # The recipe normalises before grids of other sizes are brought together, PiD's does not.
        projected = losses.unit(repa.project(params[repa.NAME], tokens))
        aligned = losses.repa_loss(projected, examples["features"]) - 1.0
        return total + weight * aligned, {"loss": total + weight * aligned, "flow_loss": value,
                                          "repa_loss": aligned}

    def predict(self, params: Params, x: jax.Array, t: jax.Array, text: jax.Array) -> jax.Array:
        """The network's output for pictures x at times t float32 [B] in [0, 1]."""
        return self.net.apply({"params": params}, x, flow.network_time(t), text).x

    def draw(self, params: Params, noise: jax.Array, text: jax.Array, null_text: jax.Array,
             table: dpm_solver.DpmTable, scale: float,
             interval: tuple[float, float] = (0.0, 1.0), in_turn: bool = False) -> jax.Array:
        """Draws pictures; one network call a step on [unconditional, conditional].

        Args:
          noise: float32 [B, H, W, 3], standard normal.
          text: caption embeddings [B, T, E].
          null_text: embeddings of the negative prompt [1, T, E].
          table: the solver's steps, from `solver_table`.
          scale: guidance scale; 1 switches guidance off.
          interval: guidance acts where low < t < high (1 is noise); outside, the unconditional
            side is skipped.
          in_turn: one call for each side, which halves the memory of the activations.
        Returns:
          float32 [B, H, W, 3], clipped to [-1, 1].
        """
        call = functools.partial(self.predict, params)
        null_text = jnp.broadcast_to(null_text, (len(text), *null_text.shape[1:]))
        if interval != (0.0, 1.0) and scale != 1:
            scaled = guidance.guided_where_scaled(call, text, null_text)
            predict = lambda x, t: scaled(x, t[0], guidance.scale_within(t[0], scale, interval))
        elif in_turn:
            predict = guidance.guided_by_two_calls(
                functools.partial(call, text=text), functools.partial(call, text=null_text), scale)
        else:
            predict = guidance.guided_by_one_call(call, text, null_text, scale)
        pictures = dpm_solver.solve(predict, noise, table, self.config.flow.prediction_type)
        return jnp.clip(pictures, -1.0, 1.0)

    def drawing(self, batch: int, height: int,
                width: int) -> tuple[Callable, dict[str, jax.ShapeDtypeStruct]]:
        """`draw`, from noise and captions."""
        return self.draw, {"noise": float_shape(batch, height, width, 3),
                           "text": self.text_shape(batch)}

    def sample_inputs(self, heldout: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
        """The fixed prompts of the config, as many as fit `sample.count`."""
        options = self.config.sample
        return {"text": self.prompts(options.prompts[:options.count])}

    def sample(self, params: Params, inputs: Batch, rng: jax.Array, size: int | None = None,
               guidance: float | None = None) -> dict[str, jax.Array]:
        """`sample` [B, H, W, 3]: pictures of the fixed prompts."""
        size = size or self.sample_size
        noise = jax.random.normal(rng, (len(inputs["text"]), size, size, 3))
        options = self.config.sample
        pictures = self.draw(params, noise, inputs["text"], self.null_text,
                             self.solver_table(size, size, options.steps),
                             options.guidance if guidance is None else guidance)
        return {"sample": pictures}
