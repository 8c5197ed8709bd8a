"""Drawing with a training checkpoint: latents to pictures, and prompts to pictures.

    with PixelDecoder.from_checkpoint("runs/pid") as decoder:
        pictures = decoder.decode(latents, prompt="a cat", seed=3)

Both classes compile once per batch shape and step count, and what was compiled is kept for later
processes (see `compilation_cache`). Every item of a batch has its own seed, so a picture does not
depend on what it is drawn together with. `close` (or the end of the `with`) frees the weights.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.diffusion import noising
from pid_jax.errors import UserError
from pid_jax.loading import Checkpoint, Drawer, load_checkpoint
from pid_jax.objectives.pid_teacher import PidTeacher
from pid_jax.objectives.pixeldit_t2i import PixelDitT2I
from pid_jax.parallel.mesh import replicated
from pid_jax.sampling_inputs import (SamplerSettings, Text, check_finite, check_interval,
                                     check_sigma, check_size, embeddings, finished, given_noise,
                                     in_batches, noise_of_steps, padded, per_item, rows_of,
                                     sampler_settings, seeds, starting_noise)

TEST_CELLS = 4  # side of a test picture, in cells of the latent or patches
LATENT_NOISE = 1  # folded into an item's key, so that no noise is used twice
VARIANCE_PRESERVING = ("sdxl",)  # families whose latents are noised so, whatever was trained on


class PixelDecoder(Drawer):
    """Turns latents of the checkpoint's codec into pictures `sr_scale` x `spatial_factor` larger.

    Attributes:
      checkpoint: weights and objective; its `objective.codec` says which latents fit.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self._decode = jax.jit(self._draw, static_argnames=("size", "scale", "tile"),
                               out_shardings=replicated(checkpoint.mesh))

    @classmethod
    def from_checkpoint(cls, path: str | Path, which: str = "ema",
                        lora_scale: float | None = None, sequence: int = 1, data: int = 1,
                        pit_chunks: int | None = None) -> "PixelDecoder":
        """From a PiD checkpoint; see `load_checkpoint`."""
        return cls(load_checkpoint(path, which, PidTeacher, lora_scale, sequence, data,
                                   pit_chunks))

    @property
    def path(self) -> str:
        """How the network's latents are noised: "flow" or "vp", see `noising`."""
        return native_path(self.objective)

    def output_size(self, latent_shape: Sequence[int]) -> tuple[int, int]:
        """(height, width) of the picture that latents [..., h, w, C] describe."""
        cell = self.objective.codec.spatial_factor * self.objective.net.sr_scale
        return latent_shape[-3] * cell, latent_shape[-2] * cell

    def encode(self, pictures: np.ndarray, sigma: float | Sequence[float] = 0.0,
               seed: int | Sequence[int] = 0) -> jax.Array:
        """Latents of small pictures, noised as the latents of an unfinished sampling are.

        Args:
          pictures: float32 [B, h, w, 3] in [-1, 1]; sides are multiples of the codec's factor.
          sigma: noise level in [0, 1] of the result, one or one per picture.
          seed: of the noise, one for all or one per picture.
        """
        clean = self.objective.codec.encode(jnp.asarray(pictures))
        sigma = np.asarray(check_sigma(per_item(sigma, len(clean), "sigma")), np.float32)
        noise = jax.vmap(lambda seed: jax.random.normal(
            jax.random.fold_in(jax.random.key(seed), LATENT_NOISE), clean.shape[1:]))(
                seeds(seed, len(clean)))
        mixed = noising.LatentNoiser(path=self.path).mix(clean, noise, sigma)
        return jnp.where(sigma[:, None, None, None] > 0, mixed, clean)

    def decode(self, latent: np.ndarray, prompt: Text = "", sigma: float | Sequence[float] = 0.0,
               size: tuple[int, int] | None = None, steps: int | None = None,
               seed: int | Sequence[int] = 0, *, guidance: float | None = None,
               negative_prompt: str | np.ndarray | None = None, dtype: str = "float32",
               batch_size: int | None = None, tile: int | None = None,
               noise: np.ndarray | None = None, step_noise: np.ndarray | None = None
               ) -> np.ndarray:
        """Draws one picture per latent.

        Args:
          latent: float [B, h, w, C] as the codec of the run gives them.
          prompt: text for all or one per latent, or caption embeddings [B, T, E].
          sigma: noise level of the latents in [0, 1] (0: clean), one or one per latent.
          size: (height, width) of the result, at most `output_size`: what lies below and to the
            right of it, where the latents cover padding, is cut off.
          steps, guidance, negative_prompt: default to those of the run's samples.
          seed: one for all or one per latent.
          dtype: "float32", pictures in [-1, 1], or "uint8".
          batch_size: at most so many latents at a time; default: all.
          tile: draw by tiles of this side in pixels, to save memory; default: whole. The result
            is the same up to rounding, since tiles attend to the whole picture.
          noise: starting noise float [B, H, W, 3] of `output_size`, in the place of the seed's.
          step_noise: fresh noise [N - 1, B, H, W, 3] of a stochastic student's steps, likewise.
        Returns:
          [B, H, W, 3].
        Raises:
          UserError: latents, sizes or options that the network cannot take.
          RunFailed: the network's output is not finite.
        """
        latent = self.check_latents(latent)
        count, whole = len(latent), self.output_size(latent.shape)
        size = whole if size is None else self.check_cut(size, whole)
        finished(np.zeros((0, 1, 1, 3), np.float32), size, dtype)
        tile = self.tile_rows(whole, tile)
        self._note_range(*whole)
        settings = sampler_settings(self.objective, *whole, steps, guidance, negative_prompt)
        shape = (count, *whole, 3)
        inputs = (seeds(seed, count), given_noise(noise, shape, "noise"), latent,
                  np.asarray(check_sigma(per_item(sigma, count, "sigma")), np.float32),
                  embeddings(self.objective, prompt, count))
        fresh = given_noise(step_noise, (settings.steps - 1, *shape), "step_noise")

        def draw(rows: slice) -> np.ndarray:
            placed, kept = self._placed(rows_of(inputs, rows))
            pictures = self._decode(
                self.checkpoint.params, *placed, settings.null_text, settings.table,
                None if fresh is None else fresh[:, rows], size=whole, scale=settings.guidance,
                tile=tile)
            return check_finite(pictures, "picture")[:kept]

        return finished(in_batches(draw, count, batch_size), size, dtype)

    def lower(self, latent_shape: tuple[int, ...], settings: SamplerSettings,
              tile: int = 0) -> jax.stages.Lowered:
        """The program of `decode` for latents [B, h, w, C], ready to be compiled; nothing runs."""
        count, whole = latent_shape[0], self.output_size(latent_shape)
        text = self.objective.text_shape(count)
        inputs = (np.zeros(count, np.uint32), None, np.zeros(latent_shape, np.float32),
                  np.zeros(count, np.float32), np.zeros(text.shape, np.float32))
        return self._decode.lower(
            self.checkpoint.params, *self._placed(inputs)[0], settings.null_text, settings.table,
            None, size=whole, scale=settings.guidance, tile=tile)

    def tile_rows(self, size: tuple[int, int], tile: int | None) -> int:
        """Rows of patches of a tile for pictures of (height, width); 0 where one holds all."""
        self.objective.check_picture(*size)
        if tile is None:
            return 0
        rows = self.objective.tile_rows(tile, *size)
        if self.checkpoint.mesh.shape["sequence"] > 1:
            raise UserError("tile and sequence both divide a picture; choose one of them")
        return rows

    def check_cut(self, size: tuple[int, int], whole: tuple[int, int]) -> tuple[int, int]:
        """`size`; UserError unless pictures of `whole` (height, width) can be cut to it."""
        size = check_size(size)
        if size[0] > whole[0] or size[1] > whole[1]:
            raise UserError(f"size is {size[0]} x {size[1]}, but these latents describe pictures of "
                            f"{whole[0]} x {whole[1]} (height x width); choose at most that")
        return size

    def check_latents(self, latents: np.ndarray) -> np.ndarray:
        """Latents as float32 [B, h, w, C]; UserError when they are not of this codec's kind."""
        latents, codec = np.asarray(latents), self.objective.codec
        if latents.ndim != 4 or latents.shape[-1] != codec.channels:
            raise UserError(
                f"latents of shape {tuple(latents.shape)} do not fit: this checkpoint reads "
                f"{codec.family!r} latents [batch, height, width, {codec.channels}]; check that "
                "they were made for this latent family")
        latents = latents.astype(np.float32)
        if wrong := int(np.sum(~np.isfinite(latents))):
            raise UserError(f"the latent holds {wrong} values that are not finite (nan or inf); "
                            "it cannot be decoded, save it again")
        return latents

    def _test_picture(self) -> np.ndarray:
        side = TEST_CELLS * self.checkpoint.mesh.shape["sequence"]
        shape = (1, side, side, self.objective.codec.channels)
        return self.decode(np.random.default_rng(0).standard_normal(shape))

    def _compiled(self) -> tuple[Any, ...]:
        return (self._decode,)

    def _draw(self, params, seeds, noise, latents, sigma, text, null_text, table, step_noise, *,
              size, scale, tile):
        noise = starting_noise(seeds, size) if noise is None else noise
        return self.objective.decode(params, noise, latents, sigma, text, null_text, table, scale,
                                     noise_of_steps(step_noise, seeds, size), tile)


def native_path(objective: PidTeacher) -> str:
    """The noising path of the latents that a network of this family decodes."""
    if objective.codec.family in VARIANCE_PRESERVING:
        return "vp"
    return objective.noiser.path


class PixelGenerator(Drawer):
    """Draws pictures from prompts.

    Attributes:
      checkpoint: weights and objective.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        fixed = ("size", "scale", "interval", "in_turn")
        self._generate = jax.jit(self._draw, static_argnames=fixed,
                                 out_shardings=replicated(checkpoint.mesh))

    @classmethod
    def from_checkpoint(cls, path: str | Path, which: str = "ema",
                        lora_scale: float | None = None, sequence: int = 1, data: int = 1,
                        pit_chunks: int | None = None) -> "PixelGenerator":
        """From a text-to-image checkpoint; see `load_checkpoint`."""
        return cls(load_checkpoint(path, which, PixelDitT2I, lora_scale, sequence, data,
                                   pit_chunks))

    def generate(self, prompt: Text, size: tuple[int, int] | None = None,
                 steps: int | None = None, seed: int | Sequence[int] = 0, *,
                 guidance: float | None = None, negative_prompt: str | np.ndarray | None = None,
                 guidance_interval: tuple[float, float] = (0.0, 1.0), in_turn: bool = False,
                 solver: str = "dpm++2m", dtype: str = "float32", batch_size: int | None = None,
                 noise: np.ndarray | None = None) -> np.ndarray:
        """Draws one picture per prompt.

        Args:
          prompt: one text or B, or caption embeddings [B, T, E].
          size: (height, width) in pixels, any; default: that of the run's samples. Sizes that are
            no multiples of the patch size are drawn larger and cut, below and to the right.
          steps, guidance, negative_prompt: default to those of the run's samples.
          seed: one for all or one per prompt.
          guidance_interval: times between which guidance acts; 1 is noise, 0 the picture.
          in_turn: guidance by two smaller network calls, to save memory.
          solver: "dpm++2m" or "ddim".
          dtype: "float32", pictures in [-1, 1], or "uint8".
          batch_size: at most so many pictures at a time; default: all.
          noise: starting noise float [B, H, W, 3] of the padded size, in the place of the seed's.
        Returns:
          [B, H, W, 3].
        Raises:
          UserError: sizes or options that the network cannot take.
          RunFailed: the network's output is not finite.
        """
        size = check_size(size or (self.objective.sample_size,) * 2)
        whole = padded(size, self.objective.net.patch_size)
        self.objective.check_picture(*whole)
        self._note_range(*whole)
        finished(np.zeros((0, 1, 1, 3), np.float32), size, dtype)
        settings = sampler_settings(self.objective, *whole, steps, guidance, negative_prompt,
                                    solver)
        interval = check_interval(guidance_interval)
        count = 1 if isinstance(prompt, str) else len(prompt)
        inputs = (seeds(seed, count), given_noise(noise, (count, *whole, 3), "noise"),
                  embeddings(self.objective, prompt, count))

        def draw(rows: slice) -> np.ndarray:
            placed, kept = self._placed(rows_of(inputs, rows))
            pictures = self._generate(self.checkpoint.params, *placed, settings.null_text,
                                      settings.table, size=whole, scale=settings.guidance,
                                      interval=interval, in_turn=in_turn)
            return check_finite(pictures, "picture")[:kept]

        return finished(in_batches(draw, count, batch_size), size, dtype)

    def _test_picture(self) -> np.ndarray:
        side = TEST_CELLS * self.checkpoint.mesh.shape["sequence"] * self.objective.net.patch_size
        return self.generate("", (side, side))

    def _compiled(self) -> tuple[Any, ...]:
        return (self._generate,)

    def _draw(self, params, seeds, noise, text, null_text, table, *, size, scale, interval,
              in_turn):
        noise = starting_noise(seeds, size) if noise is None else noise
        return self.objective.draw(params, noise, text, null_text, table, scale, interval, in_turn)
