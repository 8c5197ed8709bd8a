"""Killed runs of PiD's stages and DiTok go on bit for bit; a chain of stages; a phase's memory."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax import objectives, train
from pid_jax.parallel.mesh import batch_sharding, single_device
from pid_jax.parallel.sharding import state_shardings
from pid_jax.training import checkpoint
from pid_jax.training.checkpoint import with_shardings
from tests import tiny
from tests.test_train import Lab

pytestmark = pytest.mark.slow

CONFIG = """
from tests import tiny
from tests.objectives import test_ditok

def get_config(objective):
    make = test_ditok.make_config if objective == "ditok_stage2" else (
        lambda data: tiny.config(objective, data))
    return make({data!r})
"""
TEXTS = ("data", "config", "card")
RUN = ("--config.total_steps=10", "--config.checkpoint.every=1", "--config.checkpoint.keep=20")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    data = tiny.write_dataset(folder / "data")
    config = folder / "config.py"
    config.write_text(CONFIG.format(data=str(data)))
    return Lab(folder, config)


def arrays(lab, workdir, step):
    folder = lab.folder / workdir / "checkpoints" / str(step)
    return {item.name: jax.device_get(checkpoint.restore_tree(
        folder, item.name, checkpoint.placed(checkpoint.saved_shapes(folder, item.name), None)))
        for item in folder.iterdir() if item.is_dir() and item.name not in TEXTS}


def of(lab, objective):
    return Lab(lab.folder, f"{lab.config}:{objective}")


@pytest.mark.parametrize("objective, items", [
    ("pixeldit_t2i", {"params", "ema", "optimizer"}),
    ("pid_teacher", {"params", "ema", "optimizer"}),
    ("pid_student", {"params", "ema", "optimizer", "fake_score", "discriminator"}),
    ("ditok_stage2", {"params", "ema", "ema2", "optimizer"})])
def test_killed_after_any_phase_is_bit_identical(lab, objective, items):
    lab = of(lab, objective)
    code, output = lab.finish(f"{objective}-whole", *RUN)
    assert code == 0, output
    cut = f"{objective}-cut"
    for step in (3, 6):  # distillation: before a student's update, and before a fake score's
        process = lab.launch(cut, *RUN)
        lab.wait_for_step(cut, step, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    code, output = lab.finish(cut, *RUN)
    assert code == 0, output
    found, expected = arrays(lab, cut, 10), arrays(lab, f"{objective}-whole", 10)
    assert set(found) == items
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_each_stage_starts_from_the_one_before(lab):
    few = ("--config.total_steps=2", "--config.checkpoint.every=2")
    assert of(lab, "pixeldit_t2i").finish("t2i", *few)[0] == 0
    code, output = of(lab, "pid_teacher").finish(
        "teacher", *few, f"--config.init_from={lab.folder / 't2i'}")
    assert code == 0 and "start fresh: ['lq_proj/" in output, output
    code, output = of(lab, "pid_student").finish(
        "student", *few, f"--config.init_from={lab.folder / 'teacher'}",
        "--config.distill.untrained_teacher=False")
    assert code == 0 and "6 parameters are not used: ['lq_proj/lq_aux_rgb_head" in output, output
    card = checkpoint.read_json(lab.folder / "student" / "checkpoints" / "2", "card")
    assert card["frozen"]["teacher"]["folder"] == str(lab.folder / "teacher" / "checkpoints" / "2")


@pytest.mark.parametrize("phase", ["student", "fake_score"])
def test_a_phase_overwrites_its_state_and_copies_nothing(phase):
    config = tiny.config("pid_student", "unused")
    config.distill.frozen_dtype = "bfloat16"
    mesh = single_device()
    objective = objectives.build(config, mesh)
    abstract = jax.eval_shape(objective.init, jax.random.key(0))
    state = with_shardings(abstract, state_shardings(abstract, mesh))
    batch = {name: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=batch_sharding(mesh))
             for name, shape in objective.batch_shapes(4, 32, 32).items()}
    program = train.compile_step(objective, mesh, state, phase)
    memory = program.lower(state, batch).compile().memory_analysis()
    held, given = size(state), size(batch)
    assert memory.argument_size_in_bytes <= held + given
    assert memory.alias_size_in_bytes == held  # all of the state is overwritten in place
    table = 8 * len(jax.tree.leaves(state))  # the addresses of the results
    assert memory.output_size_in_bytes - held - table < 1024  # the metrics
    assert size(state.frozen) < 0.51 * size(state.params)


def size(tree):
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
