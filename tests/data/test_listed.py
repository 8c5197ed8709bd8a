import json

import pyarrow
import pyarrow.parquet
import pytest

from pid_jax.data import command, listing
from pid_jax.data.dataset import Dataset
from pid_jax.data.ingest import __main__ as ingest
from tests.data import sets

ROWS = [{"file_name": "a.png", "caption": "a red door"},
        {"file_name": "deep/b.png", "prompt": "long", "prompt_short": "s", "id": 7, "label": 3}]


@pytest.fixture
def photos(tmp_path):
    for name in ("a.png", "deep/b.png", "one.png", "many_000001.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sets.encoded(sets.picture()))
    return tmp_path / "photos"


def pack(out, *options) -> dict:
    assert command.run(ingest.main, [str(o) for o in ("--dst", out, *options)]) == 0
    return {record.key: record.captions for record in Dataset(out)}


def skipped(out) -> dict:
    rows = map(json.loads, (out / "skipped.jsonl").read_text().splitlines())
    return {row["name"]: row["reason"] for row in rows}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_lists_of_files(tmp_path, photos, kind):
    table = tmp_path / f"list.{kind}"
    rows = [*ROWS, {"file_name": "../secret.png", "caption": "x"}, {"file_name": "a.png"}]
    if kind == "jsonl":
        table.write_text("\n".join(map(json.dumps, rows)))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, pyarrow.schema(
            [(n, pyarrow.string()) for n in ("file_name", "caption", "prompt", "prompt_short")]
            + [("id", pyarrow.int64()), ("label", pyarrow.int64())])), table)
    found = pack(tmp_path / "out", "--format", "list", "--src", table, "--images", photos)
    assert found == {"a": {"prompt": "a red door"},
                     "7": {"prompt": "long", "prompt_short": "s", "label": "3"}}
    reasons = list(skipped(tmp_path / "out").values())
    assert "leaves the folder" in reasons[0] and "no caption" in reasons[1]


def test_parquet_text_that_is_not_utf_8(tmp_path, photos):
    text = pyarrow.array([b"caf\xe9", b"good"]).cast(pyarrow.binary()).view(pyarrow.string())
    names = pyarrow.array(["a.png", "deep/b.png"])
    table = pyarrow.table({"file": names, "text": text})
    pyarrow.parquet.write_table(table, tmp_path / "l.parquet")
    found = pack(tmp_path / "out", "--format", "list", "--src", tmp_path / "l.parquet",
                 "--images", photos)
    assert found == {"deep/b": {"prompt": "good"}}
    assert skipped(tmp_path / "out") == {"l.parquet row 1": "it holds text that is not UTF-8"}


def test_multiaspect_metadata(tmp_path, photos):
    metadata = tmp_path / "metadata"
    metadata.mkdir()
    (metadata / "one.json").write_text(json.dumps(
        {"image_url": "x", "en_caption": " ", "caption": " second ", "prompt": "third"}))
    (metadata / "many.json").write_text(json.dumps(
        [{"en_caption": "not downloaded"}, {"en_caption": "first", "prompt": "p"}, 7]))
    (metadata / "bad.json").write_bytes(b"\xff{")
    found = pack(tmp_path / "out", "--format", "multiaspect", "--src", metadata,
                 "--images", photos)
    assert found == {"many_000001": {"prompt": "first"}, "one": {"prompt": "second"}}
    reasons = skipped(tmp_path / "out")
    assert "download it" in reasons["many.json record 0"]
    assert "not a JSON object" in reasons["many.json record 2"]
    assert "not UTF-8" in reasons["bad.json"]
    assert [entry.key for entry in listing.entries(metadata, 2)] == [
        "bad", "many_000000", "many_000001", "many_000002"]
