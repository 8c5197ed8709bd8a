"""DiTok, stage 2: a diffusion decoder for the tokens of a frozen TiTok.

| here                  | source                                                               |
|-----------------------|----------------------------------------------------------------------|
| `tokens`              | TiTok (arXiv 2406.07550), encoder and quantizer frozen                 |
| `loss`, v_loss        | JiT (arXiv 2511.13720): clean-picture prediction, v-loss               |
| `loss`, gamma_loss    | ours: 0.5 mean(exp(-g) e + g), e the squared error of a patch, g its   |
|                       | predicted log-variance                                               |
| `loss`, perceptual    | LPIPS (arXiv 1801.03924) or L1 of VGG16-BN features of x_pred and x    |
| `draw`                | JiT's Heun; guidance on the label, the tokens stay on both sides      |

The frozen parameters have neither gradient nor optimizer state nor average.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict

from pid_jax.data.labels import class_numbers
from pid_jax.data.token_cache import TokenCache
from pid_jax.models.layers import patchify
from pid_jax.objectives.base import Batch, Metrics, float_shape
from pid_jax.objectives.jit_c2i import JitC2I, int_shape
from pid_jax.training import freezing
from pid_jax.training.state import Params

DECODER = "diffusion_decoder"
FROZEN = ("encoder", "latent_tokens", "quantize")
SHARED = ("decoder_embed", "latent_token_positional_embedding")
"""Parameters of TiTok's own decoder that DiTok's starts from."""

Distance = Callable[[jax.Array, jax.Array], jax.Array]
"""Perceptual distance [B] of pictures [B, H, W, 3] in [-1, 1]."""


class DiTokStage2(JitC2I):
    """Learns to draw the picture that tokens stand for.

    A batch holds `image` float32 [B, H, W, 3] in [-1, 1], `label` int32 [B] and, with a token
    cache, `indices` int32 [B, K]; examples add JiT's and `codes` [B, K, token_size].
    """

    fresh_parameters = (rf"^{DECODER}/",)
    needs_heldout = True

    def __init__(self, config: ConfigDict, net: Any, distance: Distance | None = None,
                 cache: TokenCache | None = None):
        """Holds the pieces; `objectives.build` makes and checks them."""
        super().__init__(config, net)
        self.distance, self.cache = distance, cache

    def frozen_rules(self) -> tuple[freezing.Freeze, ...]:
        """All but the diffusion decoder."""
        return (freezing.Freeze(rf"(?!{DECODER}/).*"),)

    def averaged(self, params: Params) -> Params:
        """The diffusion decoder alone."""
        return {DECODER: params[DECODER]}

    def with_average(self, params: Params, average: Params) -> Params:
        """The frozen parameters, and the averaged decoder."""
        return {**params, **average}

    def source_paths(self, saved: Params) -> dict[str, str]:
        """From a DiTok everything; from a TiTok what is frozen, and the decoder's token inputs."""
        paths = traverse_util.flatten_dict(saved, sep="/")
        if DECODER in saved:
            return {path: path for path in paths}
        found = {path: path for path in paths if path.split("/")[0] in FROZEN}
        ours = traverse_util.flatten_dict(self.abstract_params, sep="/")
        for path, leaf in paths.items():
            top, _, rest = path.partition("/")
            target = f"{DECODER}/{rest}"
            if (top == "decoder" and rest.split("/")[0] in SHARED and target in ours
                    and ours[target].shape == leaf.shape):
                found[target] = path
        return found

    def check_weights(self, params: Params) -> None:
        """Refuses a token cache that another tokenizer made."""
        if self.cache is not None:
            self.cache.check_tokenizer({name: params[name] for name in FROZEN})

    def batch_shapes(self, batch: int, height: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Adds the cached tokens."""
        shapes = super().batch_shapes(batch, height, width)
        if self.cache is not None:
            shapes["indices"] = int_shape(batch, self.net.num_latent_tokens)
        return shapes

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """`image`, `label` (no class unless `ditok.use_labels`) and cached `indices`."""
        arrays = {"image": batch["image"], "label": self._labels(batch["caption"])}
        if self.cache is not None:
            arrays["indices"] = self.cache.of_records(batch["record"])
        return arrays

    def _labels(self, captions: list[str]) -> np.ndarray:
        if self.config.ditok.use_labels:
            return class_numbers(captions, self.net.num_classes)
        return np.full(len(captions), self.net.num_classes, np.int32)

    def loss(self, params: Params, examples: Batch) -> tuple[jax.Array, Metrics]:
        """The weighted sum of the losses; `bpp_loss` is 0, since the rate is fixed."""
        options = self.config.ditok
        z, out = self.denoised(params, examples, self.codes(params, examples))
        error = self.squared_error(examples, z, out.x)
        metrics = {"v_loss": jnp.mean(error), "gamma_loss": self._gamma_loss(error, out.gamma),
                   "perceptual_loss": self._perceptual_loss(out.x, examples["image"]),
                   "bpp_loss": jnp.zeros(())}
        total = (options.v_weight * metrics["v_loss"]
                 + options.gamma_weight * metrics["gamma_loss"]
                 + options.perceptual_weight * metrics["perceptual_loss"] + metrics["bpp_loss"])
        return total, {"loss": total, **metrics}

    def codes(self, params: Params, examples: Batch) -> jax.Array:
        """Code vectors [B, K, token_size] of the examples: cached, or encoded here."""
        if "indices" in examples:
            return self.net.apply({"params": params}, examples["indices"], method="code_vectors")
        return self.encode(params, examples["image"])[0]

    def encode(self, params: Params, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Code vectors [B, K, token_size] and indices int32 [B, K] of pictures in [-1, 1]."""
        found = self.net.apply({"params": params}, images, method="encode")
        return found.vectors, found.indices

    def _gamma_loss(self, error: jax.Array, gamma: jax.Array | None) -> jax.Array:
        """0.5 mean(exp(-g) e + g) over patches; half the v-loss where g is 0."""
        if gamma is None:
            return jnp.zeros(())
        patch = patchify(error, self.net.patch_size).mean((2, 3))
        return 0.5 * jnp.mean(jnp.exp(-gamma) * patch + gamma)

    def _perceptual_loss(self, predicted: jax.Array, image: jax.Array) -> jax.Array:
        if self.distance is None:
            return jnp.zeros(())
        return jnp.mean(self.distance(predicted.astype(jnp.float32), image))

    def drawing(self, batch: int, height: int,
                width: int) -> tuple[Callable, dict[str, jax.ShapeDtypeStruct]]:
        """`draw`, from noise, labels and code vectors."""
        def draw(params, noise, label, codes, *, null_text, table, scale):
            return self.draw(params, noise, label, table, conditions=(codes,))

        return draw, {"noise": float_shape(batch, height, width, 3), "label": int_shape(batch),
                      "codes": float_shape(batch, self.net.num_latent_tokens,
                                           self.net.token_size)}

    def sample_inputs(self, heldout: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
        """Pictures held out of training, with their labels."""
        return {"image": heldout["image"], "label": self._labels(heldout["caption"])}

    def sample(self, params: Params, inputs: Batch, rng: jax.Array, size: int | None = None,
               guidance: float | None = None) -> dict[str, jax.Array]:
        """`mean` (each picture's mean colour), `sample` and `truth`, each [B, H, W, 3]; `indices`
        int32 [B, K], their tokens."""
        image = inputs["image"]
        codes, indices = self.encode(params, image)
        table = self.solver_table(*image.shape[1:3], self.config.sample.steps, guidance)
        pictures = self.draw(params, jax.random.normal(rng, image.shape), inputs["label"], table,
                             conditions=(codes,))
        mean = jnp.broadcast_to(image.mean((1, 2), keepdims=True), image.shape)
        return {"mean": mean, "sample": pictures, "truth": image, "indices": indices}
