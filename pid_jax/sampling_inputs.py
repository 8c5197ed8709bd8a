"""What drawing is given, checked and brought to arrays: sampler, text, seeds, noise, sizes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from pid_jax.diffusion import dpm_solver, few_step
from pid_jax.errors import RunFailed, UserError
from pid_jax.images import to_uint8
from pid_jax.objectives.base import Objective

T = TypeVar("T")
Text = str | Sequence[str] | np.ndarray
"""One text, one for each picture, or caption embeddings float [B, T, E] made elsewhere."""
DTYPES = ("float32", "uint8")
SOLVERS = {"dpm++2m": 2, "ddim": 1}
"""Name -> order of DPM-Solver++; the first one is the default."""
STEP_NOISE = 2  # folded into an item's key, so that no noise is used twice


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
                     guidance: float | None = None,
                     negative_prompt: str | np.ndarray | None = None,
                     solver: str | None = None) -> SamplerSettings:
    """The given settings, with those of the run's samples in the place of None.

    Args:
      solver: one of SOLVERS; None: the objective's own.
    """
    options = objective.config.sample
    if not objective.guided:
        if guidance not in (None, 1):
            raise UserError(f"guidance is {guidance}, but this checkpoint is a distilled student, "
                            "which draws without; leave it out")
        guidance = 1.0
    guidance = float(options.guidance if guidance is None else guidance)
    if not np.isfinite(guidance):
        raise UserError(f"guidance is {guidance}; expected a finite number, 1 for none")
    steps = options.steps if steps is None else steps
    if isinstance(steps, bool | str) or not 1 <= steps < np.inf or steps != int(steps):
        raise UserError(f"steps is {steps}; the sampler needs a whole number of at least 1")
    if solver is not None and solver not in SOLVERS:
        raise UserError(f"solver is {solver!r}; choose one of {', '.join(SOLVERS)}")
    order = {} if solver is None else {"order": SOLVERS[solver]}
    table = objective.solver_table(height, width, int(steps), **order)
    negative = options.negative_prompt if negative_prompt is None else negative_prompt
    words = negative if isinstance(negative, str) else "(an embedding)"
    return SamplerSettings(table, guidance, words, embeddings(objective, negative, 1))


def embeddings(objective: Objective, text: Text, count: int) -> np.ndarray:
    """Caption embeddings float32 [count, T, E] of texts, or the given ones, checked.

    Raises:
      UserError: another number of texts, or embeddings that the network cannot read.
    """
    if not isinstance(text, np.ndarray | jax.Array):
        texts = per_item(text, count, "prompt")
        if wrong := [item for item in texts if not isinstance(item, str)]:
            raise UserError(f"prompt holds {wrong[0]!r}, which is no text")
        return objective.prompts(texts)
    net, found = objective.net, np.asarray(text)
    if (found.ndim != 3 or found.shape[0] != count or found.shape[2] != net.txt_embed_dim
            or not 1 <= found.shape[1] <= net.txt_max_length):
        raise UserError(
            f"caption embeddings of shape {found.shape} do not fit: expected [{count}, tokens, "
            f"{net.txt_embed_dim}] with at most {net.txt_max_length} tokens; use the text encoder "
            "that the network was trained with")
    if not np.isfinite(found.astype(np.float32)).all():
        raise UserError("the caption embeddings hold values that are not finite; make them again")
    return found.astype(np.float32)


def starting_noise(seeds: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Standard normal [B, H, W, 3], each picture from its own seed (uint32 [B])."""
    return jax.vmap(lambda seed: jax.random.normal(jax.random.key(seed), (*size, 3)))(seeds)


def fresh_noise(seeds: jax.Array, size: tuple[int, int], step: jax.Array) -> jax.Array:
    """Standard normal [B, H, W, 3] for one step of a stochastic sampler, from the same seeds."""
    return jax.vmap(lambda seed: jax.random.normal(jax.random.fold_in(
        jax.random.fold_in(jax.random.key(seed), STEP_NOISE), step), (*size, 3)))(seeds)


def given_noise(noise: np.ndarray | None, shape: tuple[int, ...], what: str) -> np.ndarray | None:
    """Explicit noise as float32 of `shape`; None stays None, for noise from the seeds.

    Raises:
      UserError: another shape, or values that are not finite.
    """
    if noise is None:
        return None
    noise = np.asarray(noise, np.float32)
    if noise.shape != shape:
        raise UserError(f"{what} has shape {noise.shape}; expected {shape}, one number for each of "
                        "the picture's")
    if not np.isfinite(noise).all():
        raise UserError(f"{what} holds values that are not finite (nan or inf)")
    return noise


def noise_of_steps(step_noise: jax.Array | None, seeds: jax.Array, size: tuple[int, int]
                   ) -> few_step.Draw:
    """Step -> its fresh noise: the given one [N - 1, B, H, W, 3], or from the seeds."""
    if step_noise is None:
        return lambda step: fresh_noise(seeds, size, step)
    return lambda step: step_noise[step]  # the last step weighs its noise with 0


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
        if seed is None or isinstance(seed, str) or not 0 <= seed < 2**32 or seed != int(seed):
            raise UserError(f"seed {seed} is out of range; choose one from 0 to {2**32 - 1}")
    return np.asarray(chosen, np.uint32)


def check_sigma(sigma: Sequence[float]) -> Sequence[float]:
    """The noise levels themselves; UserError for one outside [0, 1]."""
    for level in sigma:
        if level is None or isinstance(level, str) or not 0 <= level <= 1:
            raise UserError(f"sigma {level} is no noise level; choose a number from 0 (clean) to 1")
    return sigma


def check_finite(pictures: jax.Array, what: str) -> np.ndarray:
    """The pictures on the host; RunFailed when a value is nan or infinite."""
    pictures = np.asarray(jax.device_get(pictures))
    if wrong := int(np.sum(~np.isfinite(pictures))):
        raise RunFailed(f"the network drew {wrong} values that are not finite (nan or inf); no "
                        f"{what} was written: try the weights of an earlier step, or float32")
    return pictures


def check_interval(interval: Sequence[float]) -> tuple[float, float]:
    """(low, high) of a guidance interval; UserError unless 0 <= low < high <= 1."""
    low, high = interval
    if not 0 <= low < high <= 1:
        raise UserError(f"the guidance interval is {low} to {high}; expected 0 <= low < high <= 1, "
                        "where 1 is noise")
    return float(low), float(high)


def padded(size: tuple[int, int], multiple: int) -> tuple[int, int]:
    """The smallest (height, width) of whole multiples that holds `size`.

    Pictures of other sizes are drawn so large, and what lies beyond `size`, below and to the
    right, is cut off.
    """
    height, width = size
    return -(-height // multiple) * multiple, -(-width // multiple) * multiple


def check_size(size: Sequence[int]) -> tuple[int, int]:
    """(height, width); UserError unless both are whole numbers of at least 1."""
    sides = tuple(size) if np.ndim(size) == 1 else ()
    if len(sides) != 2 or any(not 1 <= side < np.inf or side != int(side)
                              for side in sides):
        raise UserError(f"size is {size!r}; expected (height, width) in pixels, such as (256, 384)")
    return int(sides[0]), int(sides[1])


def finished(pictures: np.ndarray, size: tuple[int, int], dtype: str) -> np.ndarray:
    """Pictures [B, H, W, 3] cut to `size`: float32 in [-1, 1] or uint8."""
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    pictures = pictures[:, :size[0], :size[1]]
    return to_uint8(pictures) if dtype == "uint8" else pictures


def in_batches(draw: Callable[[slice], np.ndarray], count: int, batch_size: int | None
               ) -> np.ndarray:
    """The pictures of `draw(rows)` for all rows, at most `batch_size` (None: all) at a time."""
    if batch_size is not None and batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; expected at least 1")
    step = batch_size or max(count, 1)
    parts = [draw(slice(start, min(start + step, count))) for start in range(0, count, step)]
    if not parts:
        raise UserError("there is nothing to draw: the batch is empty")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def rows_of(value: Any, rows: slice) -> Any:
    """Rows of every array in a tree."""
    return jax.tree.map(lambda array: array[rows], value)
