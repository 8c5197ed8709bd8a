"""Checkpoints of a distillation: whole in both phases, the frozen teacher by reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.objectives.pid_student import TEACHER
from pid_jax.parallel.mesh import single_device
from pid_jax.training import checkpoint, restore
from pid_jax.training.state import TrainState
from tests.objectives.test_pid_student import batch, student

STEPS = 7


@pytest.fixture
def teacher(tmp_path):
    """The workdir of a teacher's run with one checkpoint."""
    return write_teacher(tmp_path / "teacher", step=5, value=0.3)


def write_teacher(workdir, step, value):
    params = {"lq_proj": {"kernel": jnp.full((2, 2), value, jnp.float32)}}
    checkpointer = checkpoint.Checkpointer(workdir, 9)
    checkpointer.save(TrainState(jnp.int32(step), params, {"count": jnp.int32(0)}, {}), {},
                      student().config)
    checkpointer.close()
    return workdir


def distiller(teacher=None, **changes):
    objective = student(student_every=3, untrained_teacher=teacher is None, **changes)
    objective.config.total_steps = STEPS
    if teacher:
        objective.config.init_from = str(teacher)
    return objective


class Run:
    """A run whose updates are compiled once for all tests of one objective."""

    def __init__(self, objective, workdir):
        self.objective, self.workdir = objective, workdir
        self.updates = {name: jax.jit(update) for name, update in objective.phases().items()}

    def start(self):
        checkpointer = checkpoint.Checkpointer(self.workdir, 9)
        state, _ = restore.initial_state(self.objective.config, self.objective, single_device(),
                                         checkpointer)
        return state, checkpointer

    def advance(self, state, until):
        for step in range(int(state.step), until):
            state, _ = self.updates[self.objective.phase(step)](state, batch())
        return state


def test_saved_and_restored_at_any_step_is_bit_identical(tmp_path):
    whole = Run(distiller(), tmp_path / "whole")
    state, checkpointer = whole.start()
    expected = whole.advance(state, STEPS)
    checkpointer.close()
    cut = Run(whole.objective, tmp_path / "cut")
    cut.updates = whole.updates
    for until in (1, 3, 4, STEPS):  # after each kind of phase, and before each
        state, checkpointer = cut.start()
        state = cut.advance(state, until)
        checkpointer.save(state, {"step": until}, cut.objective.config)
        checkpointer.close()
    state, checkpointer = cut.start()
    checkpointer.close()
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_the_teacher_is_a_reference(tmp_path, teacher):
    run = Run(distiller(teacher, frozen_dtype="bfloat16"), tmp_path / "run")
    state, checkpointer = run.start()
    kernel = state.frozen[TEACHER]["lq_proj"]["kernel"]
    assert kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.params["lq_proj"]["kernel"], np.float32(0.3))
    np.testing.assert_array_equal(state.companions["fake_score"]["lq_proj"]["kernel"],
                                  np.float32(0.3))
    checkpointer.save(state.replace(step=state.step + 2), {}, run.objective.config)
    checkpointer.close()
    folder = checkpoint.find_step_folder(tmp_path / "run")
    items = {path.name for path in folder.iterdir() if path.is_dir()}
    assert items == {"params", "ema", "optimizer", "fake_score", "discriminator", "data", "config",
                     "card"}
    note = checkpoint.read_json(folder, "card")["frozen"][TEACHER]
    assert note["folder"] == str(teacher / "checkpoints" / "5")
    write_teacher(teacher, step=9, value=0.7)  # the teacher's run went on: the reference holds
    again, checkpointer = run.start()
    checkpointer.close()
    np.testing.assert_array_equal(again.frozen[TEACHER]["lq_proj"]["kernel"], kernel)


def test_another_teacher_is_refused(tmp_path, teacher):
    run = Run(distiller(teacher), tmp_path / "run")
    state, checkpointer = run.start()
    checkpointer.save(state.replace(step=state.step + 2), {}, run.objective.config)
    checkpointer.close()
    (teacher / "checkpoints" / "5").rename(tmp_path / "5")
    write_teacher(teacher, step=9, value=0.7)
    with pytest.raises(UserError, match="the teacher of this run was .*/5; .* other weights"):
        run.start()
    (teacher / "checkpoints" / "9").rename(tmp_path / "9")
    (tmp_path / "5").rename(teacher / "checkpoints" / "6")  # the same weights, elsewhere
    run.start()[1].close()


def test_another_dtype_of_the_teacher_is_named(tmp_path, teacher):
    run = Run(distiller(teacher), tmp_path / "run")
    state, checkpointer = run.start()
    checkpointer.save(state.replace(step=state.step + 2), {}, run.objective.config)
    checkpointer.close()
    other = Run(distiller(teacher, frozen_dtype="bfloat16"), tmp_path / "run")
    with pytest.raises(UserError, match="teacher of this run was kept in float32; set config.dist"):
        other.start()


@pytest.mark.parametrize("path, value, sentence", [
    ("codec.name", "sd3", "decodes dct latents, but config.codec.name is 'sd3'"),
    ("distill.teacher_prediction_type", "x0", "predict 'velocity' .*_prediction_type is "
                                              "'x0'; make them equal")])
def test_a_teacher_that_shapes_cannot_tell_apart_is_refused(tmp_path, teacher, path, value,
                                                            sentence):
    run = Run(distiller(teacher), tmp_path / "run")
    run.objective.config.update_from_flattened_dict({path: value})
    with pytest.raises(UserError, match=sentence):
        run.start()


def test_an_unused_head_of_the_teacher_is_left_out(tmp_path):
    tree = {"lq_proj": {"kernel": jnp.full((2, 2), 0.5), "lq_aux_rgb_head": {"bias": jnp.ones(3)}}}
    checkpointer = checkpoint.Checkpointer(tmp_path / "teacher", 1)
    checkpointer.save(TrainState(jnp.int32(1), tree, {"count": jnp.int32(0)}, {}), {},
                      student().config)
    checkpointer.close()
    state, checkpointer = Run(distiller(tmp_path / "teacher"), tmp_path / "run").start()
    checkpointer.close()
    assert set(state.params["lq_proj"]) == set(state.frozen[TEACHER]["lq_proj"]) == {"kernel"}


def test_fingerprints_see_every_bit():
    params = {"a": jnp.float32([1, 2]), "b": jnp.bfloat16(3)}
    first = int(restore.fingerprint(params))
    other = jax.tree.map(lambda leaf: leaf, params)
    other["a"] = jnp.nextafter(other["a"], jnp.float32(9))
    assert first == int(restore.fingerprint(params)) != int(restore.fingerprint(other))
