"""Checkpoints: what is written comes back, in parts too; wrong ones are refused by sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from pid_jax import config as config_lib
from pid_jax.errors import RunFailed, UserError
from pid_jax.training import checkpoint
from pid_jax.training.state import TrainState


def make_state(step: int, value: float = 1.0) -> TrainState:
    params = {"blocks": {"kernel": jnp.full((2, 3, 3), value), "bias": jnp.zeros((2, 3))}}
    average = jax.tree.map(lambda leaf: leaf + 10, params)
    return TrainState(step=jnp.int32(step), params=params,
                      opt_state=optax.adam(1e-3).init(params), ema={"ema": average})


def save(folder, *steps, keep=3):
    checkpointer = checkpoint.Checkpointer(folder, keep)
    for step in steps:
        checkpointer.save(make_state(step, step), {"step": step}, config_lib.base_config())
    checkpointer.close()


def abstract(state):
    place = SingleDeviceSharding(jax.devices()[0])
    return checkpoint.with_shardings(state, jax.tree.map(lambda _: place, state))


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_state_comes_back_whole(tmp_path):
    save(tmp_path, 7)
    state, data = checkpoint.restore_state(checkpoint.find_step_folder(tmp_path),
                                           abstract(make_state(7)))
    assert data == {"step": 7}
    assert jax.tree.structure(state) == jax.tree.structure(make_state(7))
    assert_equal(state, make_state(7, 7))


def test_keeps_the_newest(tmp_path):
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]


def test_same_step_is_saved_once(tmp_path):
    save(tmp_path, 5, 5)
    assert checkpoint.find_step_folder(tmp_path).name == "5"


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/3"])
def test_weights_load_without_the_optimizer(tmp_path, inside):
    save(tmp_path, 2, 3)
    config, params = checkpoint.load_for_inference(tmp_path / inside)
    assert config.optim.betas == (0.9, 0.999)
    assert_equal(params, make_state(3, 3).ema["ema"])
    assert_equal(checkpoint.load_for_inference(tmp_path / inside, "params")[1],
                 make_state(3, 3).params)


def test_weights_load_when_the_optimizer_is_gone(tmp_path):
    save(tmp_path, 2)
    folder = checkpoint.find_step_folder(tmp_path)
    (folder / "optimizer").rename(tmp_path / "elsewhere")
    assert_equal(checkpoint.load_for_inference(tmp_path)[1], make_state(2, 2).ema["ema"])


def test_card_says_what_it_is(tmp_path):
    save(tmp_path, 2)
    card = checkpoint.read_json(checkpoint.find_step_folder(tmp_path), "card")
    assert card["parameters"] == 24 and card["model"] == "pixeldit_t2i" and card["step"] == 2


def test_other_model_is_refused_with_the_first_differences(tmp_path):
    save(tmp_path, 2)
    folder = checkpoint.find_step_folder(tmp_path)
    other = {"blocks": {"kernel": jnp.zeros((2, 3, 4)), "gate": jnp.zeros(3)}}
    with pytest.raises(UserError, match="another model .* 1 missing: blocks/gate; 1 not in this "
                                        "model: blocks/bias; 1 of another shape: blocks/kernel"):
        checkpoint.refuse_differences(folder, "params", other)


@pytest.mark.parametrize("make, sentence", [
    (lambda path: None, "does not exist"),
    (lambda path: path.write_text("x"), "is a file"),
    (lambda path: path.mkdir(), "holds no complete checkpoint"),
    (lambda path: (path / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir(parents=True),
     "holds no complete checkpoint"),
])
def test_no_checkpoint_there(tmp_path, make, sentence):
    make(tmp_path / "run")
    with pytest.raises(UserError, match=sentence):
        checkpoint.load_for_inference(tmp_path / "run")


def test_missing_average_is_named(tmp_path):
    save(tmp_path, 2)
    with pytest.raises(UserError, match="holds no 'slow'; it holds .*ema"):
        checkpoint.load_for_inference(tmp_path, "slow")


def test_save_that_cannot_be_written_raises(tmp_path):
    checkpointer = checkpoint.Checkpointer(tmp_path, 2)
    checkpointer.folder.rmdir()
    checkpointer.folder.write_text("not a folder")
    with pytest.raises(RunFailed, match="checkpoint of step 4 could not be written to"):
        checkpointer.save(make_state(4), {}, config_lib.base_config())
        checkpointer.wait()
    checkpointer.close()


def test_failure_in_the_background_reaches_the_loop(tmp_path, monkeypatch):
    checkpointer = checkpoint.Checkpointer(tmp_path, 2)
    checkpointer.save(make_state(4), {}, config_lib.base_config())

    def full_disk():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpointer._manager, "check_for_errors", full_disk)
    with pytest.raises(RunFailed, match="step 4 could not be written .* No space left"):
        checkpointer.close()


def test_damaged_arrays_are_named(tmp_path):
    save(tmp_path, 1)
    folder = checkpoint.find_step_folder(tmp_path)
    for file in (folder / "params").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(UserError, match="checkpoints/1 is damaged .params: .*move its folder away"):
        checkpoint.restore_state(folder, abstract(make_state(1)))
    (folder / "params" / "_METADATA").write_text("{")
    with pytest.raises(UserError, match="is damaged .params"):
        checkpoint.saved_shapes(folder, "params")


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000])
def test_damaged_texts_are_named(tmp_path, text):
    save(tmp_path, 1)
    folder = checkpoint.find_step_folder(tmp_path)
    (folder / "config" / "metadata").write_text(text)
    with pytest.raises(UserError, match="no readable config"):
        checkpoint.read_config(folder)


def test_a_renamed_step_is_refused(tmp_path):
    save(tmp_path, 1)
    best = checkpoint.find_step_folder(tmp_path).rename(tmp_path / "best")
    with pytest.raises(UserError, match="was renamed"):
        checkpoint.find_step_folder(best)


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match="checkpoints is a file"):
        checkpoint.Checkpointer(tmp_path, keep=1)
