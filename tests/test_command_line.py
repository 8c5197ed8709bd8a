"""Flags that cannot be meant: one sentence each."""

import pytest

from pid_jax import command_line
from pid_jax.errors import RunFailed, RunInterrupted, UserError

CONFIG = "--config=configs/quickstart_pid.py"


@pytest.mark.parametrize("arguments, sentence", [
    ([CONFIG, "--config.totl_steps=1"], "config.totl_steps is not .*did you mean 'total_steps'"),
    ([CONFIG, "--config.optim.weight_dekay=1"], "did you mean 'weight_decay'"),
    ([CONFIG, "--config.optim.lr.x=1"], "config.optim.lr is [0-9.e-]+, not a section"),
    (["--config", "configs/nowhere.py"], "configs/nowhere.py: there is no such file"),
    (["--config=README.md"], "not a Python file"),
    (["--config=configs/__init__.py"], "has no function get_config"),
    (["--config=configs/pixeldit_t2i_2k.py:tiny"], "no variant 'tiny'"),
])
def test_wrong_config_flags(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        command_line.check_config_flags(arguments)


@pytest.mark.parametrize("text, sentence", [
    ("def get_config(:", "cannot be loaded: SyntaxError"),
    ("\nimport no_such_module", "ModuleNotFoundError: .*line 2"),
    ("def get_config():\n    raise KeyError('x')", "KeyError: 'x' .line 2"),
    ("def get_config():\n    return 3", "returns a int; expected a ConfigDict"),
])
def test_broken_config_files(text, sentence, tmp_path):
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(UserError, match=sentence):
        command_line.load_config(str(tmp_path / "broken.py"))


def test_right_config_flags():
    command_line.check_config_flags([CONFIG, "--config.optim.lr=1e-3", "--workdir=x",
                                     "--config.data.path", "y"])


@pytest.mark.parametrize("error, code", [
    (None, 0), (UserError("bad"), 2), (RunFailed("broken"), 1), (RunInterrupted("stopped"), 143),
    (RuntimeError("a fault"), 1), (MemoryError(), 1),
    (OSError(28, "No space left on device", "x.png"), 1)])
def test_exit_codes(error, code, monkeypatch, capsys):
    def main():
        if error:
            raise error

    monkeypatch.setattr(command_line, "parse_flags", lambda argv: None)
    assert command_line.run(main, ["program"]) == code
    if isinstance(error, (UserError, RunFailed)):
        assert capsys.readouterr().err == f"error: {error}\n"
    if isinstance(error, MemoryError):
        assert capsys.readouterr().err.startswith("error: there is not enough memory")
    if isinstance(error, OSError):
        assert capsys.readouterr().err == "error: No space left on device: x.png\n"
