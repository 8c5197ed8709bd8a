"""Damaged checkpoints: every file truncated, altered or gone; the run goes back, and says so."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax import config as config_lib
from pid_jax.errors import DamagedCheckpoint, UserError
from pid_jax.training import checkpoint, checksums, restore
from pid_jax.training.checkpoint import Checkpointer
from tests.training.test_checkpoint import abstract, assert_equal, make_state

CONFIG = config_lib.base_config()


def noisy_state(step: int):
    """A state whose values compress badly, so that files hold little else."""
    keys = iter(jax.random.split(jax.random.key(step), 99))
    state = make_state(step)
    noise = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), state.params)
    return state.replace(params=noise, ema={"ema": jax.tree.map(jnp.sin, noise)})


def save(folder, *steps):
    checkpointer = Checkpointer(folder, 9)
    for step in steps:
        checkpointer.save(noisy_state(step), {"step": step}, CONFIG)
    checkpointer.close()


def truncate(file, rng):
    file.write_bytes(file.read_bytes()[:rng.integers(file.stat().st_size)])


def flip_a_bit(file, rng):
    content = bytearray(file.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    file.write_bytes(content)


def delete(file, rng):
    file.unlink()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    save(folder, 4)
    return folder / "checkpoints" / "4"


@pytest.mark.parametrize("turns, every", [
    (1, 4), pytest.param(3, 1, marks=pytest.mark.slow)])  # every so manieth file
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, delete])
def test_no_damage_of_any_file_is_a_wrong_resume(tmp_path, whole, damage, turns, every):
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file()
                   and path.stat().st_size)[every // 2::every]
    rng, refused = np.random.default_rng(len(damage.__name__)), 0
    for turn, name in enumerate(files * turns):
        copy = shutil.copytree(whole, tmp_path / str(turn) / "4")
        damage(copy / name, rng)
        try:
            config = checkpoint.read_config(copy)
            state, data = checkpoint.restore_state(copy, abstract(noisy_state(4)))
        except DamagedCheckpoint:
            refused += 1
            continue
        assert_equal(state, noisy_state(4))
        assert data == {"step": 4} and not list(
            config_lib.differences(CONFIG, config, tuple(CONFIG))), name
    assert refused


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, delete])
def test_no_damage_of_its_own_files_makes_orbax_drop_a_checkpoint(tmp_path, whole, damage):
    rng = np.random.default_rng(1)
    for name in sorted(path.name for path in whole.iterdir() if path.is_file()):
        copy = shutil.copytree(whole, tmp_path / name / "checkpoints" / "4")
        damage(copy / name, rng)
        checkpointer = Checkpointer(tmp_path / name, 9)
        assert checkpointer.steps() == [4] and copy.is_dir(), name
        checkpointer.close()


def test_altered_values_are_refused_also_when_the_files_are_in_order(tmp_path):
    save(tmp_path, 4)
    other = Checkpointer(tmp_path / "other", 1)
    other.save(make_state(4), {"step": 4}, CONFIG)
    other.close()
    folder = tmp_path / "checkpoints" / "4"
    shutil.rmtree(folder / "params")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "4" / "params", folder / "params")
    with pytest.raises(DamagedCheckpoint, match="params: the checksums of 2 arrays do not fit, the "
                                                "first blocks/bias"):
        checkpoint.load_for_inference(folder, "params")


def test_sums_see_one_bit_and_places():
    values = jnp.arange(24.0).reshape(2, 3, 4)
    def total(array):
        return checksums.array_sums({"a": array})["a"]

    assert total(values) == total(values + 0)
    assert total(values) != total(values.at[1, 2, 3].set(np.nextafter(np.float32(23), 24)))
    assert total(values) != total(values[::-1]) != total(values[:, ::-1])
    assert total(values.astype(jnp.bfloat16))[0] == "bfloat16"
    assert total(jnp.zeros(3)) == total(jnp.zeros(5)) == ["float32", 0]
    assert total(jnp.array([True, False])) == ["bool", 1]


@pytest.fixture
def resumed(monkeypatch):
    """Resumes the workdir with a stand-in for what the objective would give."""
    def resume(workdir):
        checkpointer = Checkpointer(workdir, 9)
        try:
            return checkpointer, restore.resumed(CONFIG, abstract(noisy_state(0)), checkpointer)
        finally:
            checkpointer.close()

    return resume


def test_the_run_goes_back_to_the_newest_whole_one_and_says_so(tmp_path, resumed, caplog):
    save(tmp_path, 2, 4, 6)
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder / "6" / "ema")
    (folder / "4" / "card" / "metadata").write_text("{}"[:1])
    checkpointer, (found, state, data) = resumed(tmp_path)
    assert found == folder / "2" and data == {"step": 2}
    assert_equal(state, noisy_state(2))
    assert "DAMAGED CHECKPOINT of step 6" in caplog.text and "ema is gone" in caplog.text
    assert "GOING BACK to step 2" in caplog.text
    kept = sorted(path.name for path in folder.iterdir())
    assert kept[0] == "2" and [name[:9] for name in kept[1:]] == ["damaged-4", "damaged-6"]
    save(tmp_path, 4)  # the step can be saved again
    assert resumed(tmp_path)[1][0] == folder / "4"


def test_nothing_starts_anew_when_all_are_damaged(tmp_path, resumed):
    save(tmp_path, 2, 4)
    for file in tmp_path.rglob("card/metadata"):
        file.unlink()
    for _ in range(2):  # the second time too
        with pytest.raises(UserError, match="all 2 checkpoints in .* are damaged; bring back"):
            resumed(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "4"]


def test_checkpoints_without_sums_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "sealed", lambda card, *_: card)
    save(tmp_path, 4)
    state, _ = checkpoint.restore_state(tmp_path / "checkpoints" / "4", abstract(noisy_state(4)))
    assert_equal(state, noisy_state(4))
