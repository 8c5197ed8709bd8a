"""Checkpoints and pictures for the tests of the drawing commands; nothing is trained."""

from pathlib import Path

import jax
import numpy as np
from PIL import Image

from pid_jax import objectives
from pid_jax.training.checkpoint import Checkpointer
from tests import tiny


def write_checkpoint(workdir: Path, objective_name: str, step: int = 3) -> Path:
    """A checkpoint of the tiny network with random weights; the average differs from the net."""
    config = tiny.config(objective_name, workdir / "data")
    objective = objectives.build(config)
    net, average = (random_like(objective.abstract_params, seed) for seed in (0, 1))
    state = objective.start(net)
    state = state.replace(step=state.step + step, ema={"ema": average})
    checkpointer = Checkpointer(workdir, keep=1)
    checkpointer.save(state, {"step": step}, config)
    checkpointer.close()
    return workdir


def random_like(shapes, seed: int):
    """A tree of N(0, 0.2^2) float32 arrays."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jax.numpy.asarray(
        0.2 * rng.standard_normal(leaf.shape), leaf.dtype), shapes)


def write_photo(path: Path, height: int, width: int, seed: int = 0) -> np.ndarray:
    """A smooth PNG; returns its uint8 pixels [H, W, 3]."""
    corners = np.random.default_rng(seed).integers(0, 256, (3, 3, 3)).astype(np.uint8)
    picture = Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)
    return np.asarray(picture)
