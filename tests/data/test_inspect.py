import json

import numpy as np
import pytest
from PIL import Image

from pid_jax.data import command
from pid_jax.data import inspect as inspection
from tests.data import sets

SIZES = [(40, 30), (30, 40), (64, 64)] * 4


@pytest.fixture
def folder(tmp_path):
    return sets.dataset(tmp_path / "set", SIZES).folder


def run(*arguments) -> int:
    return command.run(inspection.main, [str(a) for a in arguments])


def test_report(folder, capsys):
    assert run(folder, "--buckets", "custom", "--sizes", "50x50,40x30", "--verify") == 0
    out = capsys.readouterr().out
    for words in ("complete", "12 in", "test: 12", "30 to 64", "prompt: 12, prompt_short: 12",
                  "50x50: 4", "40x30: 4", "too small: 4", "4:3: 4, 1:1: 4, 3:4: 4",
                  "0 skipped", "p000, p001", "verified   12"):
        assert words in out, words


def test_sheet_shows_the_pictures(folder, tmp_path):
    assert run(folder, "--image-size", 16, "--sheet", tmp_path / "sheet.png") == 0
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    corner = inspection.MARGIN
    small = sets.picture(*SIZES[0]).resize((160, 120), Image.Resampling.BICUBIC)
    shown = sheet[corner:corner + 120, corner:corner + 160].astype(int)
    assert np.abs(shown - np.asarray(small)).mean() < 3


def test_damage_is_listed_and_an_error(folder, tmp_path, capsys):
    sets.damage(folder, "p003")
    assert run(folder, "--verify", "--sheet", tmp_path / "sheet.png") == 2
    captured = capsys.readouterr()
    assert "p003" in captured.out and "not the file that was packed" in captured.out
    assert captured.err.startswith("error: 2 faults")
    assert (tmp_path / "sheet.png").exists()


def test_histograms_are_drawn(folder, tmp_path):
    assert run(folder, "--image-size", 35, "--histograms", tmp_path / "h.png") == 0
    drawn = np.asarray(Image.open(tmp_path / "h.png").convert("RGB")).astype(int)
    assert drawn.shape == (800, 1100, 3)
    bars = np.abs(drawn - [0x44, 0x77, 0xaa]).sum(-1) == 0
    for half in (bars[:400, 550:], bars[400:, :550], bars[400:, 550:]):
        assert half.mean() > 0.02


@pytest.mark.parametrize("change, words", [
    ({"sources": {"other": 12}}, "says sources {'other': 12}, there are {'test': 12}"),
    ({"captions": {"prompt": 1}}, "says captions"), ({"records": 11}, "says records 11"),
    ({"buckets": {}}, "says buckets"), ({"fingerprint": "0" * 64}, "indices are not those")])
def test_verify_compares_with_the_manifest(folder, capsys, change, words):
    path = folder / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert run(folder, "--verify") == 2
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("options, words", [
    (("--buckets", "round"), "round"), (("--buckets", "custom"), "at least one size"),
    (("--sizes", "64"), "for custom buckets"),
    (("--image-size", "0"), "0x0"), (("--keyz", "1"), "--keyz")])
def test_mistaken_calls(folder, capsys, options, words):
    assert run(folder, *options) == 2
    assert words in capsys.readouterr().err


def test_folders_that_are_no_data_set(tmp_path, capsys):
    assert run(tmp_path) == 2
    assert "not a packed data set" in capsys.readouterr().err
