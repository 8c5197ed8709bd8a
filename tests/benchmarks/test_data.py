"""The timing of the data path runs, and answers mistakes in one sentence."""

import json

import pytest

from benchmarks import data
from pid_jax.data import command


def test_parts_and_batches_are_timed(tmp_path, capsys):
    common = ["--sizes", "64:32", "--json", str(tmp_path / "found.json")]
    assert command.run(data.main, [*common, "--repeats", "1"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["result"]["64:32"]
    assert set(found) >= {data.BARE, "exact: decode, resize, crop", "draft: decode, resize, crop"}
    assert command.run(data.main, [*common, "--loader", "--workers", "0", "--steps", "1"]) == 0
    assert "64 to 32 px, 0 workers: " in capsys.readouterr().out


@pytest.mark.parametrize("words, sentence", [
    (["--sizes", "64"], "'64' is not a picture size"), (["--picture", "none.jpg"], "none.jpg"),
    (["--repeats", "0"], "--repeats"), (["--loader", "--workers", "-1"], "workers is -1"),
    (["--config", "none.py"], "--config none.py: there is no such file")])
def test_mistaken_calls(capsys, words, sentence):
    assert command.run(data.main, ["--sizes", "64:32", *words]) == 2
    assert sentence in capsys.readouterr().err
