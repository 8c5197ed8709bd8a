"""Class-conditional PixelDiT on labelled pictures (arXiv 2511.20645).

Time runs from 0 (noise) to 1 (clean), opposite to the other objectives.

| here       | paper                                                                         |
|------------|-------------------------------------------------------------------------------|
| `times`    | t = s / (s + (1 - s) shift), s logit-normal                                   |
| `loss`     | mean |v - (x - n)|^2 at x_t = t x + (1 - t) n, plus weight * REPA              |
| `draw`     | Adams-Bashforth steps with guidance in an interval of time (`FlowDPM`)        |
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from pid_jax.data.labels import class_numbers
from pid_jax.diffusion import flow, guidance, losses, velocity_sampler
from pid_jax.encoders.protocols import LatentCodec
from pid_jax.encoders.repa_teacher import teacher_tokens
from pid_jax.models import repa
from pid_jax.objectives.base import Batch, Metrics, Objective, float_shape
from pid_jax.training import freezing
from pid_jax.training.state import Params


class PixelDitC2I(Objective):
    """Learns to draw pictures of a class.

    A batch holds `image` float32 [B, H, W, 3] in [-1, 1] and `label` int32 [B], the null label
    where the label was dropped; examples add `noise` [B, H, W, 3], `t` [B] and, with REPA, the
    frozen `features` [B, L, D].
    """

    fresh_parameters = (rf"^{repa.NAME}/",)
    unused_parameters = (rf"^{repa.NAME}/",)

    def __init__(self, config: ConfigDict, net: Any, codec: LatentCodec | None = None):
        """Holds the pieces; `codec` makes the features of REPA where config.repa.weight > 0."""
        super().__init__(config, net, text=None)
        self.codec = codec

    def frozen_rules(self) -> tuple[freezing.Freeze, ...]:
        """Everything trains."""
        return ()

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """`image` and `label` of a pipeline's batch; label dropout has been done there."""
        return {"image": batch["image"], "label": self.labels(batch["caption"])}

    def labels(self, texts: Sequence[str]) -> np.ndarray:
        """int32 [B] of class numbers as text; an empty text is the null label."""
        return class_numbers(texts, self.net.num_classes)

    def examples(self, batch: Batch, rng: jax.Array) -> Batch:
        """Adds noise, time and the features of REPA."""
        image = batch["image"]
        time_key, noise_key = jax.random.split(rng)
        draw = (jax.random.uniform if self.config.flow.time_distribution == "uniform"
                else jax.random.normal)
        found = {**batch, "noise": jax.random.normal(noise_key, image.shape),
                 "t": self.times(draw(time_key, (len(image),)))}
        if self.config.repa.weight:
            found["features"] = teacher_tokens(self.codec, image)
        return found

    def times(self, draws: jax.Array) -> jax.Array:
        """Training times float32 [B]; `draws` are standard normal, or uniform where so chosen."""
        options = self.config.flow
        if options.time_distribution == "logit_normal":
            draws = jax.nn.sigmoid(draws * options.logit_std + options.logit_mean)
        return velocity_sampler.shift_towards_noise(draws, options.shift)

    def loss(self, params: Params, examples: Batch) -> tuple[jax.Array, Metrics]:
        """Flow loss plus weighted alignment."""
        options = self.config.repa
        x, noise = examples["image"], examples["noise"]
        x_t = flow.interpolate(noise, x, examples["t"])
        taps = (options.block - 1,) if options.weight else ()
        out = self.net.apply({"params": params}, x_t, examples["t"], examples["label"],
                             feature_indices=taps)
        flow_loss = losses.mean_squared_error(out.x, x - noise)
        if not options.weight:
            return flow_loss, {"loss": flow_loss, "flow_loss": flow_loss}
        tokens = out.features[0].reshape(len(x), -1, out.features[0].shape[-1])
        aligned = losses.alignment_loss(repa.project(params[repa.NAME], tokens),
                                        examples["features"])
        total = flow_loss + options.weight * aligned
        return total, {"loss": total, "flow_loss": flow_loss, "repa_loss": aligned}

    def predict(self, params: Params, x: jax.Array, t: jax.Array, label: jax.Array) -> jax.Array:
        """The velocity for pictures x at times t float32 [B] in [0, 1]."""
        return self.net.apply({"params": params}, x, t, label).x

    def draw(self, params: Params, noise: jax.Array, label: jax.Array,
             table: velocity_sampler.SamplerTable,
             step_noise: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
        """Draws pictures with the sampler and rule of `config.sample`.

        Args:
          noise: float32 [B, H, W, 3], standard normal.
          label: int32 [B].
          table: from `solver_table`.
          step_noise: step index -> standard normal like `noise`, where the rule draws.
        Returns:
          float32 [B, H, W, 3], clipped to [-1, 1].
        """
        options = self.config.sample
        velocity = guidance.guided_where_scaled(
            lambda x, t, y: self.predict(params, x, t, y), label,
            jnp.full_like(label, self.net.null_label))
        pictures = velocity_sampler.sample(velocity, noise, table, options.sampler, options.rule,
                                           step_noise)
        return jnp.clip(pictures, -1.0, 1.0)

    def solver_table(self, height: int, width: int, steps: int, scale: float | None = None
                     ) -> velocity_sampler.SamplerTable:
        """The sampler's steps; guidance and shift of `config.sample` unless `scale` is given."""
        options = self.config.sample
        velocity_sampler.check_rule(options.sampler, options.rule)
        return velocity_sampler.make_table(
            steps, options.guidance if scale is None else scale,
            self.config.flow.shift if options.shift is None else options.shift,
            options.last_step, options.guidance_interval)

    def batch_shapes(self, batch: int, height: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of what `prepare` makes."""
        return {"image": float_shape(batch, height, width, 3),
                "label": jax.ShapeDtypeStruct((batch,), jnp.int32)}

    def drawing(self, batch: int, height: int,
                width: int) -> tuple[Callable, dict[str, jax.ShapeDtypeStruct]]:
        """`draw`, from noise and labels; the table holds the guidance scale."""
        def draw(params, noise, label, *, null_text, table, scale):
            return self.draw(params, noise, label, table, lambda step: noise)

        shapes = self.batch_shapes(batch, height, width)
        return draw, {"noise": shapes["image"], "label": shapes["label"]}

    def sample_inputs(self, heldout: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
        """The classes of `sample.prompts` (digits), as many as fit `sample.count`."""
        options = self.config.sample
        return {"label": self.labels(options.prompts[:options.count])}

    def sample(self, params: Params, inputs: Batch, rng: jax.Array, size: int | None = None,
               guidance: float | None = None) -> dict[str, jax.Array]:
        """`sample` [B, H, W, 3]: pictures of the fixed classes."""
        size, steps = size or self.sample_size, self.config.sample.steps
        shape = (len(inputs["label"]), size, size, 3)
        noise_key, step_key = jax.random.split(rng)
        pictures = self.draw(params, jax.random.normal(noise_key, shape), inputs["label"],
                             self.solver_table(size, size, steps, guidance),
                             lambda step: jax.random.normal(jax.random.fold_in(step_key, step),
                                                            shape))
        return {"sample": pictures}
