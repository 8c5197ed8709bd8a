"""The PiD teacher: decodes noised latents of small pictures into large ones (arXiv 2605.23902).

| here          | paper                                                                 |
|---------------|-----------------------------------------------------------------------|
| `degrade`     | LQ = bicubic(x0), latent = codec(LQ), noised by sigma, dropped at times |
| `loss`        | flow loss + weight * alignment of the auxiliary RGB head with LQ       |
| `decode`      | DPM-Solver++ 2M, guidance on the text only                             |
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from pid_jax.diffusion import (degrade, dpm_solver, few_step, flow, guidance, losses,
                               noising)
from pid_jax.encoders.frozen import Frozen
from pid_jax.encoders.protocols import LatentCodec, TextEncoder
from pid_jax.errors import UserError
from pid_jax.models import repa
from pid_jax.objectives.base import Batch, Metrics, Objective, float_shape, check_divides
from pid_jax.training import freezing
from pid_jax.training.state import Params

FRESH_NOISE = 2  # folded into the key of a sample, beside the two that it is split into


class PidTeacher(Objective):
    """Learns to draw a picture given the latent of its small version.

    A batch holds `image` float32 [B, H, W, 3] in [-1, 1], `text` float32 [B, T, E] and
    `sigma_range` float32 [B, 2]. Examples add `noise` [B, H, W, 3], `t` [B], the network's
    `latent` [B, h, w, C] with its `sigma` [B], and, for the alignment, `small`
    [B, H/sr, W/sr, 3] and `align_share` [B], which sums to 1 over the whole batch.
    """

    fresh_parameters = (r"^lq_proj/", r"^pit_lq_gate/")
    unused_parameters = (rf"^{repa.NAME}/",)
    needs_heldout = True

    def __init__(self, config: ConfigDict, net: Any, text: TextEncoder, codec: LatentCodec):
        """Holds the pieces; `objectives.build` makes and checks them."""
        super().__init__(config, net, text)
        self.codec, self.lq_scale = codec, net.sr_scale
        self.noiser = make_noiser(config.noising)
        self.align = make_align_loss(config.align)

    def frozen_rules(self) -> tuple[freezing.Freeze, ...]:
        """With `train_lq_proj_only`, all but the LQ branch and its gates."""
        if self.net.train_lq_proj_only:
            return (freezing.ALL_BUT_LQ,)
        return super().frozen_rules()

    def check_picture(self, height: int, width: int) -> None:
        """Refuses sizes that patches, or latent cells of the small picture, do not tile."""
        super().check_picture(height, width)
        scale, factor = self.net.sr_scale, self.codec.spatial_factor
        check_divides(height, width, scale * factor, f"sr_scale {scale} x codec factor {factor}")
        if isinstance(self.codec, Frozen):
            self.codec.check_images((1, height // scale, width // scale, 3))

    def tile_rows(self, tile: int, height: int, width: int) -> int:
        """Rows of patches with the area of a square of `tile` pixels a side, at least one.

        0 where they hold all of a picture. UserError unless patches fill the square.
        """
        patch = self.net.patch_size
        if tile < 1 or tile % patch:
            raise UserError(f"tile is {tile} pixels; expected a multiple of the patch size {patch}")
        rows = max(1, tile**2 // (width * patch))
        return rows if rows * patch < height else 0

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """`image`, `text`, `sigma_range` and stored `latent` of a pipeline's batch."""
        ranges = self.noiser.sigma_ranges(batch["source"], len(batch["image"]))
        if "sigma_range" in batch:  # registered by some of the sources
            ranges = np.where(np.isnan(batch["sigma_range"]), ranges, batch["sigma_range"])
        stored = {"latent": batch["latent"]} if "latent" in batch else {}
        return {"image": batch["image"], "text": self.prompts(batch["caption"]),
                "sigma_range": ranges, **stored}

    def examples(self, batch: Batch, rng: jax.Array) -> Batch:
        """Degrades the pictures and draws noise and time."""
        image = batch["image"]
        time_key, noise_key, latent_key = jax.random.split(rng, 3)
        small, latent, sigma = self.degrade(image, batch["sigma_range"], latent_key,
                                            batch.get("latent"))
        examples = {"image": image, "text": batch["text"], "latent": latent, "sigma": sigma,
                    "noise": jax.random.normal(noise_key, image.shape),
                    "t": self.draw_times(time_key, *image.shape[:3])}
        return examples | self.alignment_target(small, latent, sigma)

    def degrade(self, image: jax.Array, sigma_range: jax.Array, rng: jax.Array,
                latent: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Small pictures, the latents that the network sees, and their sigma [B].

        A dropped latent is all zeros and keeps its sigma.
        Args: latent: clean ones [B, h, w, C] where they are known; else the codec makes them.
        """
        noise_key, drop_key = jax.random.split(rng)
        small = degrade.downsample(image, self.net.sr_scale)
        latent = self.codec.encode(small) if latent is None else latent
        sigma = jnp.zeros(len(image))
        if self.config.noising.enabled:
            draws = noising.draw(noise_key, latent.shape)
            latent, sigma = self.noiser.apply(latent, sigma_range, draws)
        kept = jax.random.uniform(drop_key, (len(image),)) >= self.config.noising.latent_dropout
        return small, latent * flow.per_sample(kept, latent), sigma

    def alignment_target(self, small: jax.Array, latent: jax.Array, sigma: jax.Array) -> Batch:
        """`small` and each sample's share in the alignment loss; empty when it is off."""
        if not self.config.align.enabled:
            return {}
        weights = self.align.weights(small, sigma, losses.latent_is_kept(latent))
        return {"small": small, "align_share": losses.shares(weights)}

    def loss(self, params: Params, examples: Batch) -> tuple[jax.Array, Metrics]:
        """Flow loss plus weighted alignment loss."""
        options, align = self.config.flow, self.config.align
        x0, noise, t = examples["image"], examples["noise"], examples["t"]
        x_t = flow.interpolate(x0, noise, t, options.sigma_min)
        out = self.net.apply(
            {"params": params}, x_t, flow.network_time(t), examples["text"],
            lq_latent=examples["latent"], degrade_sigma=examples["sigma"],
            return_lq_aux=align.enabled)
        flow_loss = flow.flow_loss(out.x, x_t, x0, noise, t, options.prediction_type,
                                   options.sigma_min)
        total, metrics = options.loss_weight * flow_loss, {"flow_loss": flow_loss}
        if align.enabled:
            metrics["align_loss"] = self.alignment_loss(out.lq_rgb, examples)
            total = total + align.weight * metrics["align_loss"]
        return total, {"loss": total, **metrics}

    def alignment_loss(self, predicted: jax.Array, examples: Batch) -> jax.Array:
        """This micro-batch's part of the alignment loss; parts average to the whole batch's."""
        distances = self.align.distances(predicted, examples["small"])
        return self.config.optim.accumulate * jnp.sum(examples["align_share"] * distances)

    def predict(self, params: Params, x: jax.Array, t: jax.Array, text: jax.Array,
                latent: jax.Array, sigma: jax.Array) -> jax.Array:
        """The network's output for pictures x at times t float32 [B] in [0, 1]."""
        return self.net.apply({"params": params}, x, flow.network_time(t), text, lq_latent=latent,
                              degrade_sigma=sigma).x

    def predictor(self, params: Params, latent: jax.Array, sigma: jax.Array,
                  tile: int) -> Callable[..., jax.Array]:
        """`predict(x, t, text)` for these latents, by tiles of so many rows of patches."""
        drawing = self
        if tile:
            drawing = copy.copy(self)
            drawing.net = self.net.clone(tile_rows=tile)
        return lambda x, t, text: drawing.predict(params, x, t, text, latent, sigma)

    def decode(self, params: Params, noise: jax.Array, latent: jax.Array, sigma: jax.Array,
               text: jax.Array, null_text: jax.Array, table: dpm_solver.DpmTable,
               scale: float, draw: few_step.Draw | None = None,
               tile: int = 0) -> jax.Array:
        """Decodes latents; guidance is on the text only, by two network calls a step.

        Args:
          noise: float32 [B, H, W, 3], standard normal.
          latent: float32 [B, h, w, C] of the codec.
          sigma: float32 [B], noise level of the latents in [0, 1].
          text: caption embeddings [B, T, E].
          null_text: embeddings of the negative prompt [1, T, E].
          table: the solver's steps, from `solver_table`.
          scale: guidance scale; 1 switches guidance off.
          draw: fresh noise of a step; this solver asks for none.
          tile: rows of patches that are worked on at a time; 0: all.
        Returns:
          float32 [B, H, W, 3], clipped to [-1, 1].
        """
        null_text = jnp.broadcast_to(null_text, (text.shape[0], *null_text.shape[1:]))
        predict = self.predictor(params, latent, sigma, tile)
        conditional, unconditional = (functools.partial(predict, text=side)
                                      for side in (text, null_text))
        predict = guidance.guided_by_two_calls(conditional, unconditional, scale)
        pictures = dpm_solver.solve(predict, noise, table, self.config.flow.prediction_type)
        return jnp.clip(pictures, -1.0, 1.0)

    def batch_shapes(self, batch: int, height: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Adds the range of each sample's noise level."""
        return super().batch_shapes(batch, height, width) | {"sigma_range": float_shape(batch, 2)}

    def drawing(self, batch: int, height: int,
                width: int) -> tuple[Callable, dict[str, jax.ShapeDtypeStruct]]:
        """`decode`, from noise, latents with their noise levels, and captions."""
        cell = self.net.sr_scale * self.codec.spatial_factor
        return self.decode, {
            "noise": float_shape(batch, height, width, 3),
            "latent": float_shape(batch, height // cell, width // cell, self.codec.channels),
            "sigma": float_shape(batch), "text": self.text_shape(batch)}

    def sample_inputs(self, heldout: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
        """Pictures held out of training, and their captions; or fixed latents, see `sample`."""
        named = {name: rows for name, rows in heldout.items()
                 if name in ("image", "latent", "sigma", "small", "truth")}
        if "latent" in named:
            cell = self.net.sr_scale * self.codec.spatial_factor
            self.check_picture(*(side * cell for side in named["latent"].shape[1:3]))
        return {**named, "text": self.prompts(heldout["caption"])}

    def sample(self, params: Params, inputs: Batch, rng: jax.Array, size: int | None = None,
               guidance: float | None = None) -> dict[str, jax.Array]:
        """`sample` and, where they are known, `bicubic` and `truth`, each [B, H, W, 3].

        The inputs are pictures, which are reduced, encoded and noised to `sample.sigma`, or
        `latent` [B, h, w, C] with their `sigma` [B] and perhaps the pictures `small` and `truth`.
        """
        options = self.config.sample
        noise_key, latent_key = jax.random.split(rng)
        if "latent" not in inputs:
            inputs = inputs | self.degraded(inputs["image"], latent_key)
        cell = self.net.sr_scale * self.codec.spatial_factor
        batch, height, width, _ = inputs["latent"].shape
        shape = (batch, height * cell, width * cell, 3)
        columns = {}
        if "small" in inputs:
            columns["bicubic"] = degrade.upsample(inputs["small"], *shape[1:3])
        columns["sample"] = self.decode(
            params, jax.random.normal(noise_key, shape), inputs["latent"], inputs["sigma"],
            inputs["text"], self.null_text, self.solver_table(*shape[1:3], options.steps),
            options.guidance if guidance is None else guidance,
            few_step.gaussian_draws(jax.random.fold_in(rng, FRESH_NOISE), shape))
        return columns | ({"truth": inputs["truth"]} if "truth" in inputs else {})

    def degraded(self, image: jax.Array, rng: jax.Array) -> Batch:
        """`small`, `latent`, `sigma` and `truth` of pictures, at the noise level of the samples."""
        small = degrade.downsample(image, self.net.sr_scale)
        latent, sigma = self.noised_latent(small, rng, self.config.sample.sigma)
        return {"small": small, "latent": latent, "sigma": sigma, "truth": image}

    def noised_latent(self, small: jax.Array, rng: jax.Array,
                      sigma: float) -> tuple[jax.Array, jax.Array]:
        """Latents of small pictures at noise level sigma, and that level [B]."""
        clean = self.codec.encode(small)
        levels = jnp.full(len(clean), sigma, jnp.float32)
        return self.noiser.mix(clean, jax.random.normal(rng, clean.shape), levels), levels


def make_noiser(options: ConfigDict) -> noising.LatentNoiser:
    """The latent noiser that the config describes."""
    return noising.LatentNoiser(
        apply_prob=options.apply_prob, clean_ratio=options.clean_latent_ratio,
        sigma_min=options.add_sigma_min, sigma_max=options.add_sigma_max, path=options.path,
        overrides=tuple(noising.SigmaOverride(*override) for override in options.overrides))


def make_align_loss(options: ConfigDict) -> losses.AlignLoss:
    """The alignment loss that the config describes."""
    return losses.AlignLoss(sigma_power=options.sigma_power, y_weight=options.y_weight,
                            chroma_weight=options.chroma_weight, eps=options.eps)
