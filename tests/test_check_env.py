"""The page about a machine: it ends in PASS, or names what is missing."""

import importlib.metadata

import jax
import pytest
from absl.testing import flagsaver
from ml_collections import ConfigDict

from pid_jax import check_env, objectives
from pid_jax.errors import RunFailed, UserError


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    if not check_env.flags.FLAGS.is_parsed():
        check_env.flags.FLAGS.mark_as_parsed()


def page(capsys, **flags) -> list[str]:
    with flagsaver.flagsaver(**flags):
        check_env.main()
    return capsys.readouterr().out.splitlines()


def broken_step():
    yield check_env.Finding("training step", str(1 / 0))


@pytest.mark.parametrize("step", [
    pytest.param(check_env.training_step, marks=pytest.mark.slow, id="with a real training step"),
    pytest.param(lambda: iter([check_env.Finding("training step", "left out")]), id="without")])
def test_a_machine_that_can_train_passes(capsys, tmp_path, monkeypatch, step):
    step.__name__ = "training_step"
    monkeypatch.setattr(check_env, "training_step", step)
    lines = page(capsys, workdir=str(tmp_path / "later" / "run"), free_gib=0.001)
    assert lines[-1] == "PASS" and all(line.startswith("ok ") for line in lines[:-1])
    for what in ("python", "packages", "devices", "kernel chunked", "disk", "training step"):
        assert any(what in line for line in lines), what


def test_what_is_missing_is_named(capsys, monkeypatch):
    monkeypatch.setattr(check_env, "kernels", lambda: iter(()))
    monkeypatch.setattr(check_env, "training_step", broken_step)
    with pytest.raises(RunFailed, match="3 of .* devices: .* cpu .*asks for tpu.*; disk: .*"
                                        "free_gib asks for 1e.09; broken step: ZeroDivision"):
        page(capsys, platform="tpu", free_gib=1e9)
    assert "PASS" not in capsys.readouterr().out


def test_a_workdir_in_a_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "file/run"):
        with flagsaver.flagsaver(workdir=str(tmp_path / name)):
            disk = next(check_env.space())
        assert disk.missing and "it cannot be written to" in disk.text


def test_a_missing_package_is_named(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert "pip install jax jaxlib" in list(check_env.versions())[1].text


def test_missing_weights_say_how_they_are_made():
    with pytest.raises(UserError, match="nowhere/encoder.json is missing: python -m "
                                        "tools.convert_torch_weights encoder --name flux"):
        check_env._described(lambda **_: None, ConfigDict({"name": "flux", "weights": "nowhere"}))
    assert check_env._described(lambda **_: None, ConfigDict({"name": "dct"})) == (
        "dct reads no files")


def test_a_wrong_kernel_is_seen():
    def wrong(q, k, v):
        return 1.01 * jax.nn.dot_product_attention(q, k, v)

    assert check_env._kernel_error(wrong, "float32") > check_env.TOLERANCE["float32"]


def test_the_tiny_step_is_one_of_the_real_objective():
    objective = objectives.build(check_env.tiny_config())
    batch = objective.batch_shapes(2, check_env.SIZE, check_env.SIZE)
    state, metrics = jax.eval_shape(
        objective.step, jax.eval_shape(objective.init, jax.random.key(0)), batch)
    assert metrics["loss"].shape == () and state.step.shape == ()
