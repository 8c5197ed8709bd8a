import json

import numpy as np
import pytest
from PIL import Image

from pid_jax import generate
from pid_jax.data import command
from pid_jax.inference import PixelGenerator


@pytest.fixture
def run(generator, t2i_checkpoint, tmp_path, monkeypatch):
    """Runs the command on the shared generator; gives its exit status. Output: tmp_path / "out"."""
    monkeypatch.setattr(PixelGenerator, "from_checkpoint", lambda *_: generator)
    return lambda *arguments: command.run(generate.main, [
        "--checkpoint", str(t2i_checkpoint), "--out", str(tmp_path / "out"),
        *map(str, arguments)])


def test_prompts_of_a_file_become_pictures_with_notes(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("# two prompts\na cat\n\n  a dog \n")
    assert run("--prompts_file", tmp_path / "prompts.txt", "--size", "16x24", "--seed", 3,
               "--negative_prompt", "blurry") == 0
    note = json.loads((tmp_path / "out" / "001.json").read_text())
    assert (note["prompt"], note["seed"], note["size"]) == ("a dog", 4, [16, 24])
    assert note["negative_prompt"] == "blurry" and note["step"] == 3 and note["steps"] == 2
    assert Image.open(tmp_path / "out" / "001.png").size == (24, 16)
    assert Image.open(tmp_path / "out" / "grid.png").size == (24, 34)
    assert json.loads((tmp_path / "out" / "grid.json").read_text())["rows"] == ["a cat", "a dog"]


def test_a_batch_of_one_draws_the_same(run, tmp_path):
    flags = ["--prompts", "a cat", "a dog", "--size", "16x24"]
    assert run(*flags) == 0
    together = np.asarray(Image.open(tmp_path / "out" / "001.png"), int)
    assert run(*flags, "--batch_size", 1) == 0
    alone = np.asarray(Image.open(tmp_path / "out" / "001.png"), int)
    assert np.abs(together - alone).max() <= 1


@pytest.mark.parametrize("arguments, words", [
    (["--prompts", "a", "--size", "17000x24"], "too large"),
    (["--prompts", "a", "--batch_size", "0"], "--batch_size is 0"),
    (["--prompts", "a", "--guidance", "nan"], "guidance is nan"),
    (["--prompts", "a", "--seed", "-1"], "seed -1 is out of range"),
    (["--prompts_file", "{}/empty.txt"], "holds no prompt"),
    (["--prompts_file", "{}/missing.txt"], "missing.txt cannot be read"),
    ([], "one of the arguments --prompts --classes --prompts_file is required"),
])
def test_bad_input_is_one_sentence_and_writes_nothing(run, tmp_path, capsys, arguments, words):
    (tmp_path / "empty.txt").write_text("# nothing\n")
    assert run(*(a.format(tmp_path) for a in arguments)) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ") and words in errors[0]
    assert not (tmp_path / "out").exists()


def test_output_that_is_not_finite_writes_nothing(run, generator, tmp_path, monkeypatch):
    monkeypatch.setattr(generator, "_generate", lambda *_, **__: np.full((1, 16, 24, 3), np.nan))
    assert run("--prompts", "a", "--size", "16x24") == 1
    assert not (tmp_path / "out").exists()
