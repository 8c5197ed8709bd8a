"""The whole training step on eight devices equals one device: loss, every gradient, new state."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax import objectives
from pid_jax.errors import UserError
from pid_jax.parallel import mesh as mesh_lib
from pid_jax.parallel.sharding import state_shardings
from pid_jax.training.state import step_key
from tests import tiny

BATCH = 8
LOSS_RELATIVE = 1e-6
GRADIENT_RELATIVE = 1e-6


def config(objective: str, height: int = tiny.SIZE):
    result = tiny.config(objective, Path("unused"))
    result.data.batch_size = BATCH
    return result


def batch_of(made, height: int, width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (BATCH, height, width, 3)).astype(np.float32)
    return made.prepare({"image": images, "caption": [f"picture {i}" for i in range(BATCH)],
                         "source": ["a"] * BATCH})


def results(options, mesh, height, width):
    """Metrics and gradients of one step on a mesh, as numpy."""
    made = objectives.build(options, mesh)
    abstract = jax.eval_shape(made.init, jax.random.key(0))
    places = state_shardings(abstract, mesh)
    state = jax.jit(made.init, out_shardings=places)(jax.random.key(0))
    batch = mesh_lib.shard_batch(batch_of(made, height, width), mesh)

    def step(state, batch):
        examples = made.examples(batch, step_key(0, state.step))
        metrics, gradients = made.gradients(state.params, examples)
        return metrics | made.update(state, gradients)[1], gradients

    return jax.device_get(jax.jit(step)(state, batch))


@functools.cache
def alone(objective: str, height: int, width: int):
    return results(config(objective), mesh_lib.single_device(), height, width)


CASES = [("pid_teacher", (8, 1, 1), 32, 32), ("pid_teacher", (2, 2, 2), 32, 32),
         ("pid_teacher", (1, 1, 8), 32, 32), ("pid_teacher", (1, 2, 4), 32, 64),
         ("pixeldit_t2i", (1, 2, 4), 32, 32)]


@pytest.mark.parametrize("objective, shape, height, width", CASES)
def test_step_equals_one_device(objective, shape, height, width):
    options = config(objective)
    mesh = mesh_lib.make_mesh(dict(zip(mesh_lib.AXES, shape)), BATCH)
    metrics, gradients = results(options, mesh, height, width)
    expected_metrics, expected_gradients = alone(objective, height, width)
    for name, value in expected_metrics.items():
        print(name, metrics[name]/value-1)
    pairs = zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected_gradients))
    worst = {}
    for (path, actual), expected in pairs:
        worst[jax.tree_util.keystr(path)] = np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-9)
    print(sorted(worst.items(), key=lambda kv: -kv[1])[:6])
