"""Pictures during training: fixed prompts or held-out photographs, drawn with the same noise."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from pid_jax import pictures
from pid_jax.diffusion import degrade
from pid_jax.encoders import perceptual
from pid_jax.errors import UserError
from pid_jax.evaluation import history, reconstruction
from pid_jax.evaluation.picture_scores import compare
from pid_jax.evaluation.scores import artefact_scores
from pid_jax.files import atomic_write
from pid_jax.objectives.base import Objective
from pid_jax.objectives.program import CodecProgram
from pid_jax.parallel import multihost
from pid_jax.parallel.mesh import batch_sharding, replicated
from pid_jax.training import fixed_inputs
from pid_jax.training.checkpoint import PARAMS
from pid_jax.training.state import TrainState

logger = logging.getLogger(__name__)

FOLDER = "samples"
SAMPLE_STREAM = 2**31 - 1  # a step that no run reaches
BATCHES = "batches"  # the sheet of `sample.batches`
SAMPLE, TRUTH, INDICES = "sample", "truth", "indices"

Distance = Callable[[jax.Array, jax.Array], jax.Array]  # of pictures [B, H, W, 3], by picture


class Sampler:
    """Draws the grids of a run: `samples/step_<n>.png` with a JSON beside it.

    The config's further weights and sizes each make a grid of their own (`step_<n>_params.png`),
    its further guidance scales a column (`sample_cfg1`), its fixed latent batches a grid
    (`step_<n>_batches.png`).
    """

    def __init__(self, objective: Objective, workdir: Path, mesh: Mesh,
                 heldout: Mapping[int, Mapping[str, Any]]):
        """Embeds the prompts; nothing is drawn or compiled yet.

        Args:
          heldout: by size in pixels, the pictures for objectives that need some.
        """
        self._folder = Path(workdir) / FOLDER
        self._objective, self._options = objective, objective.config.sample
        seed = jax.random.key(objective.config.seed)
        self._key = jax.random.fold_in(seed, SAMPLE_STREAM)
        refuse_guidance(objective)
        self._lpips = load_lpips(self._options.lpips)
        self._inputs, self._counts = {}, {}
        sheets = {size: heldout.get(size) for size in sizes(objective)}
        if self._options.batches:
            refuse_latents(objective)
            sheets[BATCHES] = fixed_inputs.read(self._options.batches, objective.codec,
                                                objective.lq_scale)
        for sheet, source in sheets.items():
            inputs = objective.sample_inputs(source)
            self._counts[sheet] = len(next(iter(inputs.values())))
            self._inputs[sheet] = jax.device_put(whole_rows(inputs, mesh), batch_sharding(mesh))
        self._draw = CodecProgram(objective, lambda objective: objective.sample, mesh,
                                  out_shardings=replicated(mesh),
                                  static_argnames=("size", "guidance"))

    def write(self, state: TrainState) -> dict[str, float]:
        """Draws all grids and returns the scores of the first, of the config's main choice.

        Every process takes part in drawing; one writes.
        """
        found = [self._write_grid(state, weights, size) for weights, size in self._grids()]
        return found[0]

    def _grids(self) -> Iterator[tuple[str, int | str]]:
        for size in self._inputs:
            for weights in (self._options.weights, *self._options.more_weights):
                yield weights, size

    def _write_grid(self, state: TrainState, weights: str, size: int | str) -> dict[str, float]:
        step = int(state.step)
        params, drawn = state.params, PARAMS
        if (average := state.ema.get(weights)) is not None:
            params, drawn = self._objective.with_average(params, average), weights
        columns = self._columns(params, size)
        indices = columns.pop(INDICES, None)
        if not multihost.is_writer():
            return {}
        scores = score(columns, self._objective.lq_scale, self._lpips)
        scores |= artefact_scores(columns[SAMPLE], self._objective.net.patch_size)
        path = self._folder / f"{self._name(step, weights, size)}.png"
        pictures.save_png(path, pictures.grid(list(columns.values())))
        note = {"step": step, "columns": list(columns), "weights": drawn, "size": size, **scores}
        with atomic_write(path.with_suffix(".json")) as file:
            file.write(json.dumps(note, indent=2) + "\n")
        if indices is not None and weights == self._options.weights:
            self._record(step, columns, indices)
        logger.info("samples of step %d in %s%s", step, path,
                    "".join(f" | {name} {value:.2f}" for name, value in scores.items()))
        return scores

    def _record(self, step: int, columns: Mapping[str, np.ndarray], indices: np.ndarray) -> None:
        """Adds the reconstructions of tokens to the run's evaluation history."""
        scores = reconstruction.Scores(self._objective.net.codebook_size)
        scores.add(columns[TRUTH], columns[SAMPLE], indices)
        note = {"weights": self._options.weights, "pictures": len(indices), "data": "samples"}
        history.record(self._folder.parent, history.Evaluation(
            step, scores.results(), scores.unavailable, note),
            pictures.grid([columns[SAMPLE], columns[TRUTH]]))

    def _columns(self, params: Any, size: int | str) -> dict[str, np.ndarray]:
        """The pictures of one grid, with a column for each guidance scale."""
        columns = self._drawn(params, size, self._options.guidance)
        truth = columns.pop(TRUTH, None)
        for guidance in self._options.more_guidance:
            columns[f"{SAMPLE}_cfg{guidance:g}"] = self._drawn(params, size, guidance)[SAMPLE]
        return columns if truth is None else {**columns, TRUTH: truth}

    def _drawn(self, params: Any, size: int | str, guidance: float) -> dict[str, np.ndarray]:
        drawn = jax.device_get(self._draw(params, self._inputs[size], self._key,
                                          size=None if size == BATCHES else size,
                                          guidance=float(guidance)))
        return {name: column[:self._counts[size]] for name, column in drawn.items()}

    def _name(self, step: int, weights: str, size: int | str) -> str:
        main = size == self._objective.sample_size
        return (f"step_{step:07d}" + ("" if weights == self._options.weights else f"_{weights}")
                + ("" if main else f"_{size}"))


def sizes(objective: Objective) -> tuple[int, ...]:
    """The sizes of pictures that a run draws, the main one first."""
    return tuple(dict.fromkeys((objective.sample_size, *objective.config.sample.more_sizes)))


def refuse_latents(objective: Objective) -> None:
    """Raises UserError where an objective draws from no latents."""
    if objective.lq_scale is None:
        raise UserError(f"config.sample.batches holds latents, which the objective "
                        f"{objective.config.objective!r} does not draw from; leave it empty")


def refuse_guidance(objective: Objective) -> None:
    """Raises UserError for guidance scales that an objective would not read."""
    if objective.config.sample.more_guidance and not objective.guided:
        raise UserError(f"config.sample.more_guidance is {objective.config.sample.more_guidance}, "
                        f"but the objective {objective.config.objective!r} draws without guidance; "
                        "leave it empty")


def whole_rows(inputs: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, np.ndarray]:
    """`inputs` with the last row repeated until the batch axes of the mesh divide the rows."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    return {name: np.concatenate([rows, np.repeat(rows[-1:], -len(rows) % ways, axis=0)])
            for name, rows in inputs.items()}


def load_lpips(path: str) -> Distance | None:
    """LPIPS on VGG16 with weights from a file, jitted; None for an empty path."""
    return jax.jit(perceptual.load_distance("lpips_vgg", path)) if path else None


def score(columns: Mapping[str, np.ndarray], lq_scale: int | None = None,
          lpips: Distance | None = None) -> dict[str, float]:
    """Mean PSNR (dB), SSIM and CIEDE2000 of every column against `truth`, where there is a truth.

    Args:
      columns: float [B, H, W, 3] in [-1, 1].
      lq_scale: then also the scores `lq_*` of the sample, reduced by it, against the low-quality
        pictures: what it makes of its input, whatever detail it adds.
      lpips: then also `lpips_*` of every column.
    """
    if TRUTH not in columns:
        return {}
    truth = columns[TRUTH]
    scores = {}
    for name, column in columns.items():
        if name != TRUTH:
            scores |= {f"{metric}_{name}": value
                       for metric, value in compare(column, truth).items()}
            if lpips is not None:
                scores[f"lpips_{name}"] = float(np.mean(lpips(column, truth)))
    if lq_scale:
        small, reduced = (np.asarray(degrade.downsample(column, lq_scale))
                          for column in (truth, columns[SAMPLE]))
        scores |= {f"lq_{metric}_{SAMPLE}": value
                   for metric, value in compare(reduced, small).items()}
    return scores
