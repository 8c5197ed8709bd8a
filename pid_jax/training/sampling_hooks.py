"""Pictures during training: fixed prompts or held-out photographs, drawn with the same noise."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from pid_jax import images, pictures
from pid_jax.evaluation import image_metrics
from pid_jax.files import atomic_write
from pid_jax.objectives.base import Objective
from pid_jax.parallel import multihost
from pid_jax.parallel.mesh import batch_sharding, replicated
from pid_jax.training.state import TrainState

logger = logging.getLogger(__name__)

FOLDER = "samples"
SAMPLE_STREAM = 2**31 - 1  # a step that no run reaches


class Sampler:
    """Draws the grid of a run and writes it to `samples/step_<n>.png` with a JSON beside it."""

    def __init__(self, objective: Objective, workdir: Path, mesh: Mesh,
                 heldout: Mapping[str, Any] | None):
        """Embeds the prompts; nothing is drawn or compiled yet."""
        self._folder = Path(workdir) / FOLDER
        self._options = objective.config.sample
        seed = jax.random.key(objective.config.seed)
        self._key = jax.random.fold_in(seed, SAMPLE_STREAM)
        inputs = objective.sample_inputs(heldout)
        self._count = len(next(iter(inputs.values())))
        self._inputs = jax.device_put(whole_rows(inputs, mesh), batch_sharding(mesh))
        self._draw = jax.jit(objective.sample, out_shardings=replicated(mesh))

    def write(self, state: TrainState) -> dict[str, float]:
        """Draws with the weights of the config and returns the metrics of the pictures.

        Every process takes part in drawing; one writes.
        """
        step = int(state.step)
        params = state.ema.get(self._options.weights, state.params)
        columns = jax.device_get(self._draw(params, self._inputs, self._key))
        if not multihost.is_writer():
            return {}
        columns = {name: column[:self._count] for name, column in columns.items()}
        scores = score(columns)
        path = self._folder / f"step_{step:07d}.png"
        pictures.save_png(path, pictures.grid(list(columns.values())))
        note = {"step": step, "columns": list(columns), "weights": self._options.weights, **scores}
        with atomic_write(path.with_suffix(".json")) as file:
            file.write(json.dumps(note, indent=2) + "\n")
        logger.info("samples of step %d in %s%s", step, path,
                    "".join(f" | {name} {value:.2f}" for name, value in scores.items()))
        return scores


def whole_rows(inputs: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, np.ndarray]:
    """`inputs` with the last row repeated until the batch axes of the mesh divide the rows."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    return {name: np.concatenate([rows, np.repeat(rows[-1:], -len(rows) % ways, axis=0)])
            for name, rows in inputs.items()}


def score(columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """PSNR of every other column against `truth`, where there is a truth."""
    if "truth" not in columns:
        return {}
    as_bytes = {name: images.to_uint8(column) for name, column in columns.items()}
    truth = as_bytes.pop("truth")
    return {f"psnr_{name}": float(np.mean(image_metrics.psnr(column, truth)))
            for name, column in as_bytes.items()}
