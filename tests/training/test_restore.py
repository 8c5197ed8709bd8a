"""Where a run starts from, and the checkpoints that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax import objectives
from pid_jax.config import base_config
from pid_jax.errors import UserError
from pid_jax.parallel import mesh as mesh_lib
from pid_jax.training import checkpoint, restore
from tests import tiny


def abstract_state(config):
    return jax.eval_shape(objectives.build(config).init, jax.random.key(0))


def zeros(tree, value=0.0):
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, value, leaf.dtype), tree)


def save(folder, config, step=3, value=0.5):
    """A checkpoint of the config's model whose every weight is `value`, its average twice that."""
    state = zeros(abstract_state(config), value)
    state = state.replace(step=jnp.int32(step), ema=zeros(state.ema, 2 * value))
    checkpointer = checkpoint.Checkpointer(folder, 2)
    checkpointer.save(state, {"step": step}, config)
    checkpointer.close()


def start(config, workdir):
    mesh = mesh_lib.make_mesh(config.mesh, config.data.batch_size)
    checkpointer = checkpoint.Checkpointer(workdir, 2)
    try:
        return restore.initial_state(config, objectives.build(config), mesh, checkpointer)
    finally:
        checkpointer.close()


@pytest.fixture
def text_to_image():
    return tiny.config("pixeldit_t2i", "unused")


def test_own_workdir_comes_first(tmp_path, text_to_image):
    save(tmp_path / "own", text_to_image, step=3, value=1.0)
    save(tmp_path / "other", text_to_image, step=2)
    text_to_image.resume = text_to_image.init_from = str(tmp_path / "other")
    state, data = start(text_to_image, tmp_path / "own")
    assert int(state.step) == 3 and data == {"step": 3}
    assert all((leaf == 1).all() for leaf in jax.tree.leaves(state.params))


def test_resume_takes_everything_from_another_run(tmp_path, text_to_image):
    save(tmp_path / "other", text_to_image, step=2)
    text_to_image.resume = str(tmp_path / "other")
    text_to_image.optim.lr = 3e-3  # may change
    state, data = start(text_to_image, tmp_path / "own")
    assert int(state.step) == 2 and data == {"step": 2}
    assert (state.opt_state.adam[0].count == 0).all()


@pytest.fixture
def teacher_from(tmp_path, text_to_image, caplog):
    """The teacher's first weights when it starts from a text-to-image checkpoint."""
    save(tmp_path / "source", text_to_image)
    config = tiny.config("pid_teacher", "unused")
    config.init_from = str(tmp_path / "source")
    objective = objectives.build(config)
    abstract = jax.eval_shape(objective.init, jax.random.key(0)).params
    shapes = checkpoint.placed(abstract, None)
    with caplog.at_level("INFO", logger="pid_jax"):
        return restore.initial_weights(config, objective, shapes), caplog.text


def test_teacher_starts_from_a_text_to_image_checkpoint(teacher_from):
    params, log = teacher_from
    fresh = {"lq_proj", "pit_lq_gate"}
    backbone = {name: tree for name, tree in params.items() if name not in fresh}
    assert all((leaf == 1).all() for leaf in jax.tree.leaves(backbone))  # the average
    assert any((leaf != 1).any() for leaf in jax.tree.leaves(params["lq_proj"]))
    assert "starting from the ema weights" in log and "start fresh: ['lq_proj/" in log


def test_text_to_image_does_not_start_from_a_teacher(tmp_path, text_to_image):
    save(tmp_path / "source", tiny.config("pid_teacher", "unused"))
    text_to_image.init_from = str(tmp_path / "source")
    with pytest.raises(UserError, match="holds another model .* not in this model: lq_proj/"):
        start(text_to_image, tmp_path / "own")


def test_what_shapes_do_not_tell_is_said(tmp_path, text_to_image, caplog):
    save(tmp_path / "source", text_to_image)
    text_to_image.init_from = str(tmp_path / "source")
    text_to_image.flow.prediction_type, text_to_image.flow.shift = "x0", 3.0
    with caplog.at_level("WARNING", logger="pid_jax"):
        start(text_to_image, tmp_path / "own")
    assert "another config: config.flow.prediction_type: 'velocity' -> 'x0'" in caplog.text
    assert "flow.shift" not in caplog.text  # how it trains, not what it is


def test_another_width_is_refused(tmp_path, text_to_image):
    save(tmp_path / "source", text_to_image)
    text_to_image.init_from = str(tmp_path / "source")
    text_to_image.model.hidden_size = 32
    with pytest.raises(UserError, match="of another shape: .*24.* -> .*32"):
        start(text_to_image, tmp_path / "own")


@pytest.mark.parametrize("section, key, value", [
    ("model", "patch_depth", 3), ("text", "name", "other"), (None, "seed", 5)])
def test_resuming_another_config_is_refused(tmp_path, text_to_image, section, key, value):
    save(tmp_path, text_to_image)
    folder = checkpoint.find_step_folder(tmp_path)
    changed = text_to_image.copy_and_resolve_references()
    (changed[section] if section else changed)[key] = value
    with pytest.raises(UserError, match=f"written with another config: .*{key}"):
        restore.resume(folder, changed, None)


@pytest.mark.parametrize("key, value", [("remat", "full"), ("pit_chunks", 2), ("unroll", 2)])
def test_how_a_step_is_computed_may_change(tmp_path, text_to_image, key, value):
    save(tmp_path, text_to_image)
    text_to_image.model[key] = value
    state, _ = start(text_to_image, tmp_path)
    assert int(state.step) == 3


def test_fewer_steps_than_done_are_refused(tmp_path, text_to_image):
    save(tmp_path, text_to_image, step=9)
    with pytest.raises(UserError, match="of step 9, past config.total_steps 4"):
        restore.resume(checkpoint.find_step_folder(tmp_path), text_to_image, None)


def test_bfloat16_weights_become_float32(tmp_path):
    params = {"blocks": {"kernel": jnp.full((2, 2), 0.3, jnp.bfloat16)}}
    state = checkpoint.TrainState(jnp.int32(1), params, {"count": jnp.int32(0)}, {})
    checkpointer = checkpoint.Checkpointer(tmp_path, 1)
    checkpointer.save(state, {}, base_config())
    checkpointer.close()
    folder = checkpoint.find_step_folder(tmp_path)
    wanted = checkpoint.placed({"blocks": {"kernel": jax.ShapeDtypeStruct((2, 2), jnp.float32)}},
                               None)
    kernel = checkpoint.restore_tree(folder, "params", wanted)["blocks"]["kernel"]
    assert kernel.dtype == jnp.float32
    np.testing.assert_array_equal(kernel, np.float32(jnp.bfloat16(0.3)))
