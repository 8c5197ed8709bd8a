"""Drawing with a training checkpoint: latents to pictures, and prompts to pictures.

    decoder = PixelDecoder.from_checkpoint("runs/pid")
    pictures = decoder.decode(latents, prompts="a cat", seed=3)

Both classes compile once per batch shape and step count. Every item of a batch has its own seed, so
a picture does not depend on what it is drawn together with.
"""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from pid_jax import models, objectives
from pid_jax.config import check_config
from pid_jax.diffusion import dpm_solver, few_step
from pid_jax.errors import RunFailed, UserError
from pid_jax.models.lora import AdaptedNet
from pid_jax.objectives.base import Objective
from pid_jax.objectives.pid_teacher import PidTeacher
from pid_jax.objectives.pixeldit_t2i import PixelDitT2I
from pid_jax.parallel.mesh import AXES, make_mesh, replicated, single_device
from pid_jax.parallel.sharding import state_shardings
from pid_jax.training import checkpoint as checkpoint_lib
from pid_jax.training.state import Params
from pid_jax.training.weights import read_weights

WEIGHTS = {"ema": "ema", "net": checkpoint_lib.PARAMS, "untrained": None}
COMMAND_OF = {"pid_teacher": "pid_jax.decode", "pid_student": "pid_jax.decode",
              "pixeldit_t2i": "pid_jax.generate --prompts",
              "pixeldit_c2i": "pid_jax.generate --classes",
              "jit_c2i": "pid_jax.generate --classes",
              "ditok_stage2": "pid_jax.tokens decode"}
LATENT_NOISE, STEP_NOISE = 1, 2  # folded into an item's key, so that no noise is used twice

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A network ready to draw.

    Attributes:
      folder: the step's folder.
      which: "ema", "net" or "untrained".
      objective: the run's objective, with its config, network and encoders.
      params: the weights.
      mesh: where they lie and pictures are drawn.
    """

    folder: Path
    which: str
    objective: Objective
    params: Params
    mesh: Mesh

    @property
    def config(self) -> ConfigDict:
        """The config that the run was started with."""
        return self.objective.config

    def note(self) -> dict[str, Any]:
        """What a picture's JSON says about where it comes from."""
        return {"checkpoint": str(self.folder), "step": int(self.folder.name),
                "weights": self.which, "config": self.config.to_dict()}


def load_checkpoint(path: str | Path, which: str,
                    wanted: type[Objective] | tuple[type[Objective], ...],
                    lora_scale: float | None = None, sequence: int = 1) -> Checkpoint:
    """Loads what drawing needs; the optimizer is not read.

    Args:
      path: a workdir, its checkpoints folder (newest step) or one step's folder.
      which: "ema" (the average) or the name of another average, "net" (the last weights) or
        "untrained" (drawn as at step 0). A converted checkpoint has one set of weights, which
        serves as both.
      wanted: the objective that the checkpoint must be of.
      lora_scale: strength of the low-rank adapters, 0 for the network without them; default 1.
      sequence: devices over which the tokens of every picture, and the weights, are divided.
    Raises:
      UserError: no checkpoint there, one of another objective, or with weights of another network.
    """
    folder = checkpoint_lib.find_step_folder(path)
    check_which(folder, which)
    # Every process of several draws on its own first device.
    mesh = single_device() if sequence == 1 else make_mesh(dict(zip(AXES, (1, 1, sequence))),
                                                           batch=1)
    objective = open_objective(folder, wanted, mesh)
    params = load_weights(folder, which, objective, mesh)
    return Checkpoint(folder, which, *folded(objective, params, lora_scale), mesh)


def open_objective(folder: Path, wanted: type[Objective] | tuple[type[Objective], ...],
                   mesh: Mesh | None = None) -> Objective:
    """The objective of a checkpoint, without weights; UserError when it is no `wanted` one."""
    objective = objectives.build(read_config(folder), mesh)
    if not isinstance(objective, wanted):
        name = objective.config.objective
        raise UserError(f"the checkpoint {folder} is of the objective {name!r}: draw with "
                        f"`python -m {COMMAND_OF[name]}`, or name a checkpoint for this command")
    return objective


def check_which(folder: Path, which: str) -> None:
    """Refuses weights that neither every checkpoint nor this one has."""
    known = [*WEIGHTS, *checkpoint_lib.read_json(folder, checkpoint_lib.CARD).get("averages", ())]
    if which not in known:
        raise UserError(f"weights {which!r} are unknown; choose one of "
                        f"{', '.join(dict.fromkeys(known))}")


def folded(objective: Objective, params: Params, lora_scale: float | None
           ) -> tuple[Objective, Params]:
    """An objective and weights without adapters: they are added to the kernels.

    Raises:
      UserError: a scale for a network that has none, or one that is not finite.
    """
    if not isinstance(objective.net, AdaptedNet):
        if lora_scale is not None:
            raise UserError("lora_scale is set, but this checkpoint has no low-rank adapters; "
                            "leave it out")
        return objective, params
    scale = 1.0 if lora_scale is None else lora_scale
    if not np.isfinite(scale):
        raise UserError(f"lora_scale is {scale}; expected a number, such as 1, or 0 for none")
    plain = copy.copy(objective)
    plain.net = objective.net.net
    for known in ("abstract_params", "mask"):  # of the network with adapters
        plain.__dict__.pop(known, None)
    return plain, jax.jit(objective.net.lora.fold)(params, scale)


def read_config(folder: Path) -> ConfigDict:
    """The checkpoint's config; UserError for one that this version cannot run."""
    config = checkpoint_lib.read_config(folder)
    try:
        check_config(config)
    except UserError as error:
        raise UserError(f"the checkpoint {folder} has another form of config: {error}") from error
    return config


def load_weights(folder: Path, which: str, objective: Objective, mesh: Mesh) -> Params:
    """The weights `which` of one step's folder, checked against the network of its config."""
    name = WEIGHTS.get(which, which)
    if name is None:
        places = state_shardings(objective.abstract_params, mesh)
        draw = jax.jit(lambda key: models.init_parameters(objective.net, key), out_shardings=places)
        return draw(jax.random.key(objective.config.seed))
    if checkpoint_lib.is_converted(folder):
        name = checkpoint_lib.PARAMS
    if name == checkpoint_lib.PARAMS:
        return _read_item(folder, name, objective, objective.abstract_params, mesh)
    average = _read_item(folder, name, objective, objective.averaged(objective.abstract_params),
                         mesh)
    if average.keys() == objective.abstract_params.keys():
        return average
    rest = _read_item(folder, checkpoint_lib.PARAMS, objective, objective.abstract_params, mesh)
    return objective.with_average(rest, average)


def _read_item(folder: Path, name: str, objective: Objective, wanted: Params,
               mesh: Mesh) -> Params:
    """One item in the dtypes in which it is stored."""
    stored = checkpoint_lib.flat(checkpoint_lib.saved_shapes(folder, name))
    abstract = checkpoint_lib.nested({
        path: jax.ShapeDtypeStruct(leaf.shape, getattr(stored.get(path), "dtype", leaf.dtype))
        for path, leaf in checkpoint_lib.flat(wanted).items()})
    return read_weights(folder, name, checkpoint_lib.placed(abstract, mesh), "the checkpoint",
                        unused=objective.unused_parameters)[0]


class PixelDecoder:
    """Turns latents of the checkpoint's codec into pictures `sr_scale` x `spatial_factor` larger.

    Attributes:
      checkpoint: weights and objective; its `objective.codec` says which latents fit.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self._decode = jax.jit(self._draw, static_argnames=("size", "scale"),
                               out_shardings=replicated(checkpoint.mesh))

    @classmethod
    def from_checkpoint(cls, path: str | Path, which: str = "ema",
                        lora_scale: float | None = None, sequence: int = 1) -> "PixelDecoder":
        """From a PiD checkpoint; see `load_checkpoint`."""
        return cls(load_checkpoint(path, which, PidTeacher, lora_scale, sequence))

    @property
    def objective(self) -> PidTeacher:
        """The run's objective."""
        return self.checkpoint.objective

    def output_size(self, latent_shape: Sequence[int]) -> tuple[int, int]:
        """(height, width) of the picture that latents [..., h, w, C] describe."""
        cell = self.objective.codec.spatial_factor * self.objective.net.sr_scale
        return latent_shape[-3] * cell, latent_shape[-2] * cell

    def encode(self, pictures: np.ndarray, sigma: float | Sequence[float] = 0.0,
               seed: int | Sequence[int] = 0) -> jax.Array:
        """Latents of small pictures, noised as in training.

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
        return jnp.where(sigma[:, None, None, None] > 0,
                         self.objective.noiser.mix(clean, noise, sigma), clean)

    def decode(self, latents: np.ndarray, prompts: str | Sequence[str] = "",
               sigma: float | Sequence[float] = 0.0, steps: int | None = None,
               guidance: float | None = None, negative_prompt: str | None = None,
               seed: int | Sequence[int] = 0) -> np.ndarray:
        """Draws one picture per latent.

        Args:
          latents: float [B, h, w, C] as the codec of the run gives them.
          prompts: one for all or one per latent.
          sigma: noise level of the latents in [0, 1] (0: clean), one or one per latent.
          steps, guidance, negative_prompt: default to those of the run's samples.
          seed: one for all or one per latent.
        Returns:
          float32 [B, H, W, 3] in [-1, 1], of `output_size`.
        Raises:
          UserError: latents, sizes or options that the network cannot take.
          RunFailed: the network's output is not finite.
        """
        latents = self.check_latents(latents)
        count, (height, width) = len(latents), self.output_size(latents.shape)
        self.objective.check_picture(height, width)
        settings = sampler_settings(self.objective, height, width, steps, guidance, negative_prompt)
        pictures = self._decode(
            self.checkpoint.params, seeds(seed, count), latents,
            np.asarray(check_sigma(per_item(sigma, count, "sigma")), np.float32),
            self.objective.prompts(per_item(prompts, count, "prompts")), settings.null_text,
            settings.table, size=(height, width), scale=settings.guidance)
        return check_finite(pictures, "picture")

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

    def _draw(self, params, seeds, latents, sigma, text, null_text, table, *, size, scale):
        noise = starting_noise(seeds, size)
        return self.objective.decode(params, noise, latents, sigma, text, null_text, table, scale,
                                     functools.partial(fresh_noise, seeds, size))


class PixelGenerator:
    """Draws pictures from prompts.

    Attributes:
      checkpoint: weights and objective.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self._generate = jax.jit(self._draw, static_argnames=("size", "scale"),
                                 out_shardings=replicated(checkpoint.mesh))

    @classmethod
    def from_checkpoint(cls, path: str | Path, which: str = "ema",
                        lora_scale: float | None = None, sequence: int = 1) -> "PixelGenerator":
        """From a text-to-image checkpoint; see `load_checkpoint`."""
        return cls(load_checkpoint(path, which, PixelDitT2I, lora_scale, sequence))

    @property
    def objective(self) -> PixelDitT2I:
        """The run's objective."""
        return self.checkpoint.objective

    def generate(self, prompts: Sequence[str], size: tuple[int, int] | None = None,
                 steps: int | None = None, guidance: float | None = None,
                 negative_prompt: str | None = None, seed: int | Sequence[int] = 0) -> np.ndarray:
        """Draws one picture per prompt.

        Args:
          prompts: B texts.
          size: (height, width) in pixels; default: that of the run's samples.
          steps, guidance, negative_prompt: default to those of the run's samples.
          seed: one for all or one per prompt.
        Returns:
          float32 [B, H, W, 3] in [-1, 1].
        Raises:
          UserError: sizes or options that the network cannot take.
          RunFailed: the network's output is not finite.
        """
        height, width = size or (self.objective.sample_size,) * 2
        self.objective.check_picture(height, width)
        settings = sampler_settings(self.objective, height, width, steps, guidance, negative_prompt)
        pictures = self._generate(
            self.checkpoint.params, seeds(seed, len(prompts)), self.objective.prompts(prompts),
            settings.null_text, settings.table, size=(height, width), scale=settings.guidance)
        return check_finite(pictures, "picture")

    def _draw(self, params, seeds, text, null_text, table, *, size, scale):
        return self.objective.draw(params, starting_noise(seeds, size), text, null_text, table,
                                   scale)


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
    """What a sampler needs beside its inputs.

    Attributes:
      table: the solver's steps.
      guidance: scale, 1 for none.
      negative_prompt: text of the unconditional side; `null_text` [1, T, E] is its embedding.
    """

    table: dpm_solver.DpmTable | few_step.StepTable
    guidance: float
    negative_prompt: str
    null_text: np.ndarray

    @property
    def steps(self) -> int:
        """Network evaluations (pairs of them under guidance)."""
        return self.table.steps

    def note(self) -> dict[str, Any]:
        """What a picture's JSON says about them."""
        return {"steps": self.steps, "guidance": self.guidance,
                "negative_prompt": self.negative_prompt}


def sampler_settings(objective: Objective, height: int, width: int, steps: int | None = None,
                     guidance: float | None = None, negative_prompt: str | None = None
                     ) -> SamplerSettings:
    """The given settings, with those of the run's samples in the place of None."""
    options = objective.config.sample
    if not objective.guided:
        if guidance not in (None, 1):
            raise UserError(f"guidance is {guidance}, but this checkpoint is a distilled student, "
                            "which draws without; leave it out")
        guidance = 1.0
    guidance = float(options.guidance if guidance is None else guidance)
    if not np.isfinite(guidance):
        raise UserError(f"guidance is {guidance}; expected a finite number, 1 for none")
    negative = options.negative_prompt if negative_prompt is None else negative_prompt
    steps = options.steps if steps is None else steps
    if steps < 1:
        raise UserError(f"steps is {steps}; the sampler needs at least 1")
    table = objective.solver_table(height, width, steps)
    return SamplerSettings(table, guidance, negative, objective.prompts([negative]))


def starting_noise(seeds: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Standard normal [B, H, W, 3], each picture from its own seed (uint32 [B])."""
    return jax.vmap(lambda seed: jax.random.normal(jax.random.key(seed), (*size, 3)))(seeds)


def fresh_noise(seeds: jax.Array, size: tuple[int, int], step: jax.Array) -> jax.Array:
    """Standard normal [B, H, W, 3] for one step of a stochastic sampler, from the same seeds."""
    return jax.vmap(lambda seed: jax.random.normal(jax.random.fold_in(
        jax.random.fold_in(jax.random.key(seed), STEP_NOISE), step), (*size, 3)))(seeds)


def per_item(value: T | Sequence[T], count: int, name: str) -> list[T]:
    """One value for all, or a sequence of one per item, as a list."""
    if isinstance(value, str) or np.ndim(value) == 0:
        return [value] * count
    if len(value) != count:
        raise UserError(f"{name} has {len(value)} entries for {count} pictures; give one for each, "
                        "or one for all")
    return list(value)


def seeds(value: int | Sequence[int], count: int) -> np.ndarray:
    """uint32 [count] seeds; UserError for one outside 0 .. 2^32 - 1."""
    chosen = per_item(value, count, "seed")
    for seed in chosen:
        if not 0 <= seed < 2**32:
            raise UserError(f"seed {seed} is out of range; choose one from 0 to {2**32 - 1}")
    return np.asarray(chosen, np.uint32)


def check_sigma(sigma: Sequence[float]) -> Sequence[float]:
    """The noise levels themselves; UserError for one outside [0, 1]."""
    for level in sigma:
        if not 0 <= level <= 1:
            raise UserError(f"sigma {level} is no noise level; choose a number from 0 (clean) to 1")
    return sigma


def check_finite(pictures: jax.Array, what: str) -> np.ndarray:
    """The pictures on the host; RunFailed when a value is nan or infinite."""
    pictures = np.asarray(jax.device_get(pictures))
    if wrong := int(np.sum(~np.isfinite(pictures))):
        raise RunFailed(f"the network drew {wrong} values that are not finite (nan or inf); no "
                        f"{what} was written: try the weights of an earlier step, or float32")
    return pictures
