"""Packing as a Beam pipeline, on the DirectRunner. Needs the extra `beam`, whose versions do not
agree with constraints.txt: run it in an environment of its own (docs/data.md)."""

import json
import os

import pytest

pytest.importorskip("apache_beam", reason="the extra beam has an environment of its own")

from pid_jax.data import command  # noqa: E402
from pid_jax.data.dataset import Dataset  # noqa: E402
from pid_jax.data.ingest import __main__ as ingest  # noqa: E402
from pid_jax.data.ingest import beam as beam_ingest  # noqa: E402
from tests.data import sets  # noqa: E402


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    """Two pairs of tars with one broken picture, one without caption and one key twice."""
    root = tmp_path_factory.mktemp("beam") / "tars"
    for number in range(2):
        pictures = {f"k{number}{i}.png": sets.encoded(sets.picture(seed=i)) for i in range(6)}
        texts = {f"k{number}{i}.json": json.dumps({"prompt": f"{number} {i}"}).encode()
                 for i in range(6)}
        del texts["k01.json" if number == 0 else "k11.json"]
        pictures[f"k{number}2.png"] = b"broken"
        pictures["same.png"], texts["same.json"] = pictures[f"k{number}0.png"], b'"twice"'
        sets.tar(root / "aspect_ratio_4_3" / "image" / "part_0" / f"{number}.tar", pictures)
        sets.tar(root / "aspect_ratio_4_3" / "caption" / "part_0" / f"{number}.tar", texts)
    return root


def run(*arguments) -> int:
    return command.run(beam_ingest.main, list(map(str, arguments)))


def records(folder) -> dict:
    return {record.key: record for record in Dataset(folder)}


def test_the_pipeline_packs_what_the_command_packs(tars, tmp_path, capsys):
    assert run("--src", tars, "--dst", tmp_path / "beam", "--shards", 3) == 0
    assert "packed 9 pictures" in capsys.readouterr().out
    assert command.run(ingest.main, ["--format", "webdataset", "--src", str(tars), "--dst",
                                     str(tmp_path / "one")]) == 0
    assert records(tmp_path / "beam") == records(tmp_path / "one")
    data = Dataset(tmp_path / "beam")
    assert len(data.manifest["shards"]) == 3 and data.manifest["skipped"] == 5
    assert data.manifest["sources"] == {"tars": 9} and data.manifest["buckets"] == {"4,3": 9}
    rows = map(json.loads, (tmp_path / "beam" / "skipped.jsonl").read_text().splitlines())
    assert [row["reason"].split(":")[0].split(" (")[0] for row in rows] == [
        "it has no caption", "not a picture of a known format"] * 2 + ["duplicate key"]
    assert not list((tmp_path / "beam").glob("*.part*"))


def test_names_that_are_no_text_are_reported(tmp_path):
    sets.tar(tmp_path / "src" / "a.tar", {
        os.fsdecode(b"\xff.png"): sets.encoded(sets.picture()), os.fsdecode(b"\xff.txt"): b"x",
        "good.png": sets.encoded(sets.picture()), "good.txt": b"good"})
    assert run("--src", tmp_path / "src", "--dst", tmp_path / "out", "--shards", 1) == 0
    assert set(records(tmp_path / "out")) == {"good"}
    assert "UTF-8" in (tmp_path / "out" / "skipped.jsonl").read_text()


def test_workers_and_repeats_change_nothing(tars, tmp_path):
    for name, beams in (("a", []), ("b", ["--direct_num_workers=2",
                                          "--direct_running_mode=multi_threading"])):
        assert run("--src", tars, "--dst", tmp_path / name, "--shards", 2, "--", *beams) == 0
    a, b = ({f.name: f.read_bytes() for f in (tmp_path / name).glob("shard*")} for name in "ab")
    assert a == b and Dataset(tmp_path / "a").fingerprint == Dataset(tmp_path / "b").fingerprint


def test_lists_are_packed_too(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(sets.encoded(sets.picture(seed=number)))
    rows = [{"file_name": f"{number}.png", "caption": f"number {number}"} for number in range(5)]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert run("--format", "list", "--src", tmp_path / "list.jsonl", "--dst", tmp_path / "out",
               "--shards", 2) == 0
    assert set(records(tmp_path / "out")) == {"0", "1", "2", "3"}


@pytest.mark.parametrize("options, words", [
    (("--shards", "0"), "--shards"), (("--format", "zip"), "zip"), (("--shards", "1"), "no .tar")])
def test_mistaken_calls(tmp_path, capsys, options, words):
    assert run("--src", tmp_path, "--dst", tmp_path / "out", *options) == 2
    assert words in capsys.readouterr().err


def test_arguments_that_beam_refuses(tars, tmp_path, capsys):
    assert run("--src", tars, "--dst", tmp_path / "out", "--shards", 1, "--", "--runner=No") == 2
    assert "Beam refuses its arguments --runner=No: Unexpected" in capsys.readouterr().err


def test_a_data_set_is_not_written_over(tars, tmp_path, capsys):
    sets.dataset(tmp_path / "set", [(40, 30)])
    assert run("--src", tars, "--dst", tmp_path / "set", "--shards", 1) == 2
    assert "holds a data set already" in capsys.readouterr().err


def test_remote_tars_come_with_their_partner(tars, tmp_path, monkeypatch):
    monkeypatch.setattr(beam_ingest.FileSystems, "exists", lambda path: "part_0/0" in path)
    opened = []

    def open_remote(path):
        opened.append(path)
        return open(tars / path.split("://b/")[1], "rb")

    monkeypatch.setattr(beam_ingest.FileSystems, "open", open_remote)
    root = beam_ingest.fetch_tar("gs://b", "aspect_ratio_4_3/image/part_0/0.tar", tmp_path)
    assert root == tmp_path and opened == [
        f"gs://b/aspect_ratio_4_3/{role}/part_0/0.tar" for role in ("image", "caption")]
    assert {p.relative_to(root) for p in root.rglob("*.tar")} == {
        p.relative_to(tars) for p in tars.rglob("0.tar")}
