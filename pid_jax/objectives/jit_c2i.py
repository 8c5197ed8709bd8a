"""JiT: class-conditional pictures from a plain transformer (arXiv 2511.13720).

| here        | paper                                                                    |
|-------------|--------------------------------------------------------------------------|
| `examples`  | z = t x + (1 - t) e, t = sigmoid(N(-0.8, 0.8)), labels dropped at 0.1      |
| `loss`      | mean |v - v_pred|^2, both divided by max(1 - t, 0.05)                      |
| `draw`      | Heun, the last step Euler, guidance in an interval of time                |

Time runs from 0 (noise) to 1 (clean): the other way round than in PiD.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from pid_jax.data.labels import class_numbers
from pid_jax.diffusion import clean_flow, heun
from pid_jax.errors import UserError
from pid_jax.objectives.base import Batch, Metrics, Objective, float_shape
from pid_jax.training import freezing
from pid_jax.training.state import Params


class JitC2I(Objective):
    """Learns to draw pictures of a class.

    A batch holds `image` float32 [B, H, W, 3] in [-1, 1] and `label` int32 [B]; examples add
    `noise` [B, H, W, 3] (standard normal), `t` [B] and `seed` uint32 [B] (of the dropout).
    """

    def __init__(self, config: ConfigDict, net: Any):
        """Holds the pieces; `objectives.build` makes and checks them."""
        super().__init__(config, net, text=None)

    def frozen_rules(self) -> tuple[freezing.Freeze, ...]:
        """Everything trains."""
        return ()

    def check_picture(self, height: int, width: int) -> None:
        """Refuses every size but the network's own: its positions are fixed."""
        side = self.net.input_size
        if (height, width) != (side, side):
            raise UserError(f"pictures of {width} x {height} pixels do not fit: this network draws "
                            f"{side} x {side}; set config.data.image_size (and sample.image_size) "
                            f"to {side}")

    @property
    def sample_size(self) -> int:
        """Side of the sampled pictures in pixels."""
        return self.config.sample.image_size or self.net.input_size

    def text_shape(self, batch: int) -> jax.ShapeDtypeStruct:
        """No text enters; the shape of an empty embedding."""
        return float_shape(batch, 0, 0)

    def batch_shapes(self, batch: int, height: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of what `prepare` makes."""
        return {"image": float_shape(batch, height, width, 3), "label": int_shape(batch)}

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """`image`, and `label` from the captions of a pipeline's batch."""
        return {"image": batch["image"],
                "label": class_numbers(batch["caption"], self.net.num_classes)}

    def examples(self, batch: Batch, rng: jax.Array) -> Batch:
        """Draws noise, time, dropped labels and the seeds of the dropout."""
        keys = jax.random.split(rng, 4)
        image, options = batch["image"], self.config.jit
        count = len(image)
        label = clean_flow.drop_labels(batch["label"], jax.random.uniform(keys[2], (count,)),
                                       options.label_drop, self.net.num_classes)
        return {**batch, "label": label, "noise": jax.random.normal(keys[0], image.shape),
                "t": clean_flow.times_of(jax.random.normal(keys[1], (count,)), options.p_mean,
                                         options.p_std),
                "seed": jax.random.bits(keys[3], (count,))}

    def loss(self, params: Params, examples: Batch) -> tuple[jax.Array, Metrics]:
        """The v-loss."""
        z, out = self.denoised(params, examples)
        loss = jnp.mean(self.squared_error(examples, z, out.x))
        return loss, {"loss": loss}

    def denoised(self, params: Params, examples: Batch, *conditions: jax.Array) -> tuple:
        """The noised pictures z and the network's answer to them."""
        z = clean_flow.noised(examples["image"], examples["noise"], examples["t"],
                              self.config.jit.noise_scale)
        out = self.net.apply({"params": params}, z, examples["t"], examples["label"], *conditions,
                             dropout_key=dropout_key(examples))
        return z, out

    def squared_error(self, examples: Batch, z: jax.Array, predicted: jax.Array) -> jax.Array:
        """(v - v_pred)^2 [B, H, W, 3] float32."""
        t, t_eps = examples["t"], self.config.jit.t_eps
        return jnp.square(clean_flow.velocity(examples["image"], z, t, t_eps)
                          - clean_flow.velocity(predicted.astype(jnp.float32), z, t, t_eps))

    def predict(self, params: Params, z: jax.Array, t: jax.Array,
                condition: tuple[jax.Array, ...]) -> jax.Array:
        """The velocity at states z and times t [B] in [0, 1] under (label, ...)."""
        out = self.net.apply({"params": params}, z, t, *condition)
        return clean_flow.velocity(out.x, z, t, self.config.jit.t_eps)

    def solver_table(self, height: int, width: int, steps: int,
                     scale: float | None = None) -> heun.EvaluationTable:
        """The evaluations of the config's sampler; `scale` defaults to that of the samples."""
        options = self.config.sample
        scale = options.guidance if scale is None else scale
        return heun.make_table(steps, options.sampler, scale, tuple(options.guidance_interval))

    def draw(self, params: Params, noise: jax.Array, label: jax.Array,
             table: heun.EvaluationTable,
             step_noise: Callable[[jax.Array], jax.Array] | None = None,
             conditions: tuple[jax.Array, ...] = ()) -> jax.Array:
        """Draws pictures.

        Args:
          noise: float32 [B, H, W, 3], standard normal.
          label: int32 [B]; `num_classes` means none.
          table: from `solver_table`, whose guidance is on the label only.
          step_noise: not used, these samplers draw none.
          conditions: what else the network reads, kept on the unconditional side.
        Returns:
          float32 [B, H, W, 3], clipped to [-1, 1].
        """
        null = jnp.full_like(label, self.net.num_classes)
        velocity = heun.guided_in_interval(
            lambda z, t, condition: self.predict(params, z, t, condition),
            (label, *conditions), (null, *conditions), table)
        pictures = heun.solve(velocity, self.config.jit.noise_scale * noise, table)
        return jnp.clip(pictures, -1.0, 1.0)

    def drawing(self, batch: int, height: int,
                width: int) -> tuple[Callable, dict[str, jax.ShapeDtypeStruct]]:
        """`draw`, from noise and labels."""
        def draw(params, noise, label, *, null_text, table, scale):
            return self.draw(params, noise, label, table)

        return draw, {"noise": float_shape(batch, height, width, 3), "label": int_shape(batch)}

    def sample_inputs(self, heldout: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
        """The classes that `sample.prompts` names by number."""
        options = self.config.sample
        return {"label": class_numbers(options.prompts[:options.count], self.net.num_classes)}

    def sample(self, params: Params, inputs: Batch, rng: jax.Array, size: int | None = None,
               guidance: float | None = None) -> dict[str, jax.Array]:
        """`sample` [B, H, W, 3]: pictures of the classes."""
        size = size or self.sample_size
        noise = jax.random.normal(rng, (len(inputs["label"]), size, size, 3))
        table = self.solver_table(size, size, self.config.sample.steps, guidance)
        return {"sample": self.draw(params, noise, inputs["label"], table)}


def dropout_key(examples: Batch) -> jax.Array | None:
    """The key of the network's dropout, from the examples' own seeds; None: nothing drops."""
    return jax.random.key(examples["seed"][0]) if "seed" in examples else None


def int_shape(*shape: int) -> jax.ShapeDtypeStruct:
    """An int32 array that is only described."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)
