"""The whole training step on eight devices equals one device: loss, every gradient, new state."""

import collections
import functools
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from pid_jax import objectives
from pid_jax.errors import UserError
from pid_jax.objectives import pid_student
from pid_jax.parallel import mesh as mesh_lib
from pid_jax.parallel import sequence
from pid_jax.parallel.sharding import state_shardings
from pid_jax.training.state import step_key
from tests import tiny

BATCH = 8
RELATIVE = 1e-6


def config(objective: str):
    result = tiny.config(objective, Path("unused"))
    result.data.batch_size = BATCH
    # The gradient of R1 is a difference of nearly equal halves, many times as large as itself.
    result.distill.r1_weight = 0.0
    return result


def batch_of(made, height: int, width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (BATCH, height, width, 3)).astype(np.float32)
    return made.prepare({"image": images, "caption": [f"picture {i}" for i in range(BATCH)],
                         "source": ["a"] * BATCH})


def results(options, mesh, height, width, phase=None):
    """Metrics and gradients of one step on a mesh, as numpy; `phase` is one of a distillation."""
    made = objectives.build(options, mesh)
    abstract = jax.eval_shape(made.init, jax.random.key(0))
    places = state_shardings(abstract, mesh)
    state = jax.jit(made.init, out_shardings=places)(jax.random.key(0))
    batch = mesh_lib.shard_batch(batch_of(made, height, width), mesh)

    def step(state, batch):
        examples = made.examples(batch, step_key(0, state.step))
        metrics, gradients = made.gradients(state.params, examples)
        return metrics | made.update(state, gradients)[1], gradients

    def distil(state, batch):
        state = state.replace(companions=jax.tree.map(lambda leaf: leaf + 0.05, state.companions))
        examples = made.fake_score_examples(batch, step_key(0, state.step))
        return made.phase_gradients(phase, state, examples)

    return jax.device_get(jax.jit(distil if phase else step)(state, batch))


@functools.cache
def alone(objective: str, height: int, width: int, phase: str | None = None):
    return results(config(objective), mesh_lib.single_device(), height, width, phase)


@pytest.mark.parametrize("objective, shape, height, width", [
    ("pid_teacher", (8, 1, 1), 32, 32), ("pid_teacher", (2, 2, 2), 32, 32),
    ("pid_teacher", (1, 1, 8), 32, 64), ("pid_teacher", (1, 2, 4), 32, 64),
    ("pixeldit_t2i", (1, 2, 4), 32, 32)])
def test_step_equals_one_device(objective, shape, height, width):
    assert_equals_one_device(objective, shape, height, width)


@pytest.mark.slow
@pytest.mark.parametrize("phase", [pid_student.STUDENT, pid_student.FAKE_SCORE])
@pytest.mark.parametrize("shape, height, width", [
    ((8, 1, 1), 32, 32), ((2, 2, 2), 32, 32), ((1, 1, 8), 32, 64), ((1, 2, 4), 32, 64)])
def test_distillation_equals_one_device(shape, height, width, phase):
    assert_equals_one_device("pid_student", shape, height, width, phase)


@pytest.mark.slow
def test_r1_equals_one_device():
    options = config("pid_student")
    options.distill.r1_weight = 100.0
    mesh = mesh_lib.make_mesh(dict(zip(mesh_lib.AXES, (2, 2, 2))), BATCH)
    (found, _), (expected, _) = (results(options, place, 32, 32, pid_student.FAKE_SCORE)
                                 for place in (mesh, mesh_lib.single_device()))
    # The square of a difference of logits, which are of the discriminator's loss's size.
    assert found["r1_loss"] == pytest.approx(
        expected["r1_loss"], abs=RELATIVE * float(expected["discriminator_loss"]))
    assert expected["r1_loss"] > 1e-4


def assert_equals_one_device(objective, shape, height, width, phase=None):
    mesh = mesh_lib.make_mesh(dict(zip(mesh_lib.AXES, shape)), BATCH)
    options = config(objective)
    options.model.pit_chunks = 2  # chunks and divided tokens together change nothing either
    metrics, gradients = results(options, mesh, height, width, phase)
    expected_metrics, expected_gradients = alone(objective, height, width, phase)
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=RELATIVE), name
    if phase:
        assert_networks_equal(gradients, expected_gradients)
    else:
        assert_layers_equal(flat(gradients), flat(expected_gradients))


def flat(tree) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf
            for path, leaf in jax.tree.leaves_with_path(tree)}


def assert_layers_equal(actual: dict, expected: dict, relative: float = RELATIVE) -> None:
    """Every gradient, relative to the largest of its layer: a bias's is a sum that cancels."""
    scale = collections.defaultdict(float)
    for name, leaf in expected.items():
        layer = name.rpartition("/")[0]
        scale[layer] = max(scale[layer], np.abs(leaf).max())
    assert actual.keys() == expected.keys()
    for name, leaf in expected.items():
        tolerance = relative * scale[name.rpartition("/")[0]]
        np.testing.assert_allclose(actual[name], leaf, rtol=0, atol=tolerance, err_msg=name)


def assert_networks_equal(actual: dict, expected: dict) -> None:
    """Every network's gradient as one vector, and each layer to ten times that.

    In distillation whole layers are sums that cancel: the gates', and the discriminator's, where
    real and generated pictures pull in opposite directions.
    """
    for network, gradient in expected.items():
        wrong, size = (optax.global_norm(tree) for tree in (
            jax.tree.map(np.subtract, actual[network], gradient), gradient))
        assert wrong <= RELATIVE * size, network
    assert_layers_equal(flat(actual), flat(expected), 10 * RELATIVE)


def test_wrong_meshes_are_refused_before_compiling():
    options = config("pixeldit_t2i")
    sizes = dict(zip(mesh_lib.AXES, (1, 1, 8)))
    mesh = mesh_lib.make_mesh(sizes, BATCH)
    net = objectives.build(options, mesh).net
    with pytest.raises(UserError, match="20 image tokens .* sequence 8"):
        sequence.check_network(mesh, "auto", net, 40, 32)
    with pytest.raises(UserError, match="does not divide 2 heads"):
        sequence.check_network(mesh, "ulysses", net, 32, 32)
    options.mesh.sequence_attention = "spiral"
    with pytest.raises(UserError, match="'spiral' is unknown"):
        objectives.build(options, mesh)
