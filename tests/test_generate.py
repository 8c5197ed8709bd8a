import json

import numpy as np
import pytest
from PIL import Image

from pid_jax import generate
from pid_jax.data import command
from pid_jax.errors import UserError
from pid_jax.inference import PixelGenerator
from pid_jax.sampling_inputs import SOLVERS, sampler_settings


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


def test_prompts_end_at_line_ends_only(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeff# with a byte order mark\r\na\u2028b\r\nc".encode())
    options = generate.parse(["--checkpoint", "x", "--out", "y", "--prompts_file", str(path)])
    assert generate.read_prompts(options) == ["a\u2028b", "c"]


def test_a_batch_of_one_draws_the_same(run, tmp_path):
    flags = ["--prompts", "a cat", "a dog", "--size", "16x24"]
    assert run(*flags) == 0
    together = np.asarray(Image.open(tmp_path / "out" / "001.png"), int)
    assert run(*flags, "--batch_size", 1) == 0
    alone = np.asarray(Image.open(tmp_path / "out" / "001.png"), int)
    assert np.abs(together - alone).max() <= 1


def test_several_sizes_and_seeds_of_their_own(run, tmp_path):
    assert run("--prompts", "a cat", "a dog", "--size", "16x24", "15x21", "--seeds", 9, 4) == 0
    note = json.loads((tmp_path / "out" / "001_15x21.json").read_text())
    assert (note["seed"], note["size"], note["solver"]) == (4, [15, 21], "dpm++2m")
    assert Image.open(tmp_path / "out" / "000_15x21.png").size == (21, 15)
    whole = np.asarray(Image.open(tmp_path / "out" / "001_16x24.png"), int)
    cut = np.asarray(Image.open(tmp_path / "out" / "001_15x21.png"), int)
    assert np.abs(cut - whole[:15, :21]).max() <= 1
    assert (tmp_path / "out" / "grid_16x24.png").is_file()


def test_guidance_in_turn_or_within_an_interval(generator):
    def draw(**options):
        return generator.generate("a cat", (16, 24), seed=1, negative_prompt="blurry", **options)

    plain = draw()
    np.testing.assert_allclose(draw(in_turn=True), plain, atol=1e-4)
    without = draw(guidance_interval=(0.0, 1e-6))
    assert np.abs(without - plain).max() > 1e-3
    np.testing.assert_allclose(without, draw(guidance=1.0), atol=1e-4)


def test_solvers_differ_by_their_correction(generator):
    tables = [sampler_settings(generator.objective, 16, 24, 3, solver=name).table
              for name in SOLVERS]
    assert [bool(np.any(table.correction)) for table in tables] == [True, False]
    with pytest.raises(UserError, match="solver is 'euler'"):
        sampler_settings(generator.objective, 16, 24, 3, solver="euler")


@pytest.mark.parametrize("arguments, words", [
    (["--prompts", "a", "--seeds", "1", "2"], "2 seeds for 1 pictures"),
    (["--prompts", "a", "--guidance_interval", "0.5", "0.2"], "guidance interval is 0.5 to 0.2"),
    (["--classes", "0", "--solver", "ddim"], "--solver belongs to --prompts"),
    (["--prompts", "a", "--size", "17000x24"], "too large"),
    (["--prompts", "a", "--size", "16x24", "17000x24"], "too large"),
    (["--prompts", "a", "b", "--batch_size", "1", "--seeds", "1", "-3"], "seed -3 is out of range"),
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
