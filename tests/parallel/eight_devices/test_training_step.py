"""The whole training step on eight devices equals one device: loss, every gradient, new state."""

import collections
import functools
import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from pid_jax import objectives
from pid_jax.ahead_of_time import programs
from pid_jax.errors import UserError
from pid_jax.objectives import pid_student
from pid_jax.parallel import mesh as mesh_lib
from pid_jax.parallel import sequence
from pid_jax.parallel.sharding import bytes_per_device, state_shardings
from pid_jax.training.state import step_key
from tests import double_precision, tiny

BATCH = 8
RELATIVE = 1e-6


def config(objective: str, dtype: str = "float32"):
    result = tiny.config(objective, Path("unused"))
    result.dtype = result.param_dtype = result.distill.frozen_dtype = dtype
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
def alone(objective: str, height: int, width: int, phase: str | None = None,
          dtype: str = "float32"):
    return results(config(objective, dtype), mesh_lib.single_device(), height, width, phase)


MESHES = [((8, 1, 1), 32, 32), ((2, 2, 2), 32, 32), ((1, 1, 8), 32, 64), ((1, 2, 4), 32, 64)]
PHASES = [pid_student.STUDENT, pid_student.FAKE_SCORE]


@pytest.mark.parametrize("objective, shape, height, width", [
    *(("pid_teacher", *rest) for rest in MESHES), ("pixeldit_t2i", (1, 2, 4), 32, 32)])
def test_step_equals_one_device(objective, shape, height, width):
    assert_equals_one_device(objective, shape, height, width)


@pytest.mark.parametrize("shape, height, width", [
    pytest.param(*rest, marks=() if rest[0] == (2, 2, 2) else pytest.mark.slow)
    for rest in MESHES])
def test_step_in_double_precision_equals_one_device(shape, height, width):
    assert_equal_but_for_rounding("pid_teacher", shape, height, width)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("shape, height, width", MESHES)
def test_distillation_equals_one_device(shape, height, width, phase):
    assert_equals_one_device("pid_student", shape, height, width, phase)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("shape, height, width", MESHES)
def test_distillation_in_double_precision_equals_one_device(shape, height, width, phase):
    assert_equal_but_for_rounding("pid_student", shape, height, width, phase)


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
    (metrics, gradients), (expected_metrics, expected_gradients) = both(
        objective, shape, height, width, phase, "float32")
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=RELATIVE), name
    if phase:
        for network, gradient in expected_gradients.items():
            assert_gradients_equal(gradients[network], gradient, network)
    else:
        assert_gradients_equal(gradients, expected_gradients, objective)


def assert_equal_but_for_rounding(objective, shape, height, width, phase=None):
    with double_precision.double_precision():
        (metrics, gradients), (expected_metrics, expected_gradients) = both(
            objective, shape, height, width, phase, "float64")
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=double_precision.RELATIVE), name
    assert_layers_equal(gradients, expected_gradients, double_precision.RELATIVE)


def both(objective, shape, height, width, phase, dtype):
    """Results on a mesh, with chunks of pixel tokens besides, and on one device."""
    mesh = mesh_lib.make_mesh(dict(zip(mesh_lib.AXES, shape)), BATCH)
    options = config(objective, dtype)
    options.model.pit_chunks = 2
    return (results(options, mesh, height, width, phase),
            alone(objective, height, width, phase, dtype))


def flat(tree) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf
            for path, leaf in jax.tree.leaves_with_path(tree)}


def assert_gradients_equal(actual: dict, expected: dict, network: str) -> None:
    """A network's gradient in float32 as one vector, and each layer to ten times that.

    Layer by layer, float32 is no measure: many layers' gradients are sums that cancel.
    """
    wrong, size = (optax.global_norm(tree) for tree in (
        jax.tree.map(np.subtract, actual, expected), expected))
    assert wrong <= RELATIVE * size, network
    assert_layers_equal(actual, expected, 10 * RELATIVE)


def assert_layers_equal(actual: dict, expected: dict, relative: float) -> None:
    """Every gradient, relative to the largest of its layer: a bias's is a sum that cancels."""
    actual, expected = flat(actual), flat(expected)
    scale = collections.defaultdict(float)
    for name, leaf in expected.items():
        layer = name.rpartition("/")[0]
        scale[layer] = max(scale[layer], np.abs(leaf).max())
    assert actual.keys() == expected.keys()
    for name, leaf in expected.items():
        tolerance = relative * scale[name.rpartition("/")[0]]
        np.testing.assert_allclose(actual[name], leaf, rtol=0, atol=tolerance, err_msg=name)


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


@pytest.mark.parametrize("design, gathers", [("ulysses", False), ("allgather", True)])
def test_a_compiled_step_gathers_by_design_and_overwrites_its_state(design, gathers):
    options = config("pid_teacher")
    options.mesh.sequence_attention = design
    mesh = mesh_lib.make_mesh(dict(zip(mesh_lib.AXES, (1, 4, 2))), BATCH)
    height, width = 80, 112
    tokens = height * width // options.model.patch_size**2
    program = programs.build(options, mesh, "train", height, width)
    assert not any(tokens in leaf.shape for leaf in jax.tree.leaves(program.parts["parameters"]))
    compiled = program.compile()
    shapes = gathered_shapes(compiled.as_text())
    assert shapes  # weights are divided, and the text's heads
    assert any(tokens in shape for shape in shapes) == gathers
    state = sum(bytes_per_device(part) for name, part in program.parts.items() if name != "batch")
    assert compiled.memory_analysis().alias_size_in_bytes >= state > 0


def gathered_shapes(text: str) -> list[tuple[int, ...]]:
    """Shapes that the all-gathers of a compiled program give."""
    found = re.findall(r"= \(?(.*?) all-gather(?:-start)?\(", text)
    return [tuple(map(int, dims.split(",")))
            for types in found for dims in re.findall(r"\w+\[([\d,]+)\]", types)]
