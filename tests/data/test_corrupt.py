"""Every kind of corrupt or odd input in docs/data.md: packed, or skipped with a reason; and once
packed, never fatal to an epoch unless strict."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pid_jax.data import command
from pid_jax.data.dataset import Dataset, DatasetWriter
from pid_jax.data.ingest import __main__ as ingest
from pid_jax.data.pipeline import build_pipeline
from pid_jax.data.records import Record
from pid_jax.errors import UserError
from tests.data import sets
from tests.test_images import huge_png

JPEG = sets.encoded(sets.picture(), "JPEG")
RED = (250, 0, 0)


def deep() -> bytes:
    """16-bit grey whose high bytes are 0, 1, 2, ..."""
    return sets.encoded(Image.fromarray((np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)))


def palette() -> bytes:
    image = Image.new("P", (32, 32), 0)
    image.putpalette([*RED, 0, 0, 250])
    image.paste(1, (16, 0, 32, 32))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=1)
    return buffer.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return sets.encoded(sets.picture(40, 30), "JPEG", exif=exif)


def animated() -> bytes:
    frames = [Image.new("RGB", (32, 32), colour) for colour in (RED, (0, 0, 250))]
    return sets.encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)


# kind: (file name, contents, caption file, what is packed: its size, or the reason that it is not)
PICTURES = {
    "truncated JPEG": ("x.jpg", sets.encoded(sets.picture(300, 200), "JPEG")[:3000], b"c",
                       "is damaged"),
    "zero-byte file": ("x.jpg", b"", b"c", "the file is empty"),
    "CMYK": ("x.jpg", sets.encoded(sets.picture().convert("CMYK"), "JPEG"), b"c", (40, 30)),
    "16-bit PNG": ("x.png", deep(), b"c", (16, 16)),
    "palette with alpha": ("x.png", palette(), b"c", (32, 32)),
    "EXIF rotation": ("x.jpg", turned(), b"c", (30, 40)),
    "animated WebP": ("x.webp", animated(), b"c", (32, 32)),
    "wrong extension": ("x.png", JPEG, b"c", (40, 30)),
    "no picture at all": ("x.png", b"<html>", b"c", "not a picture of a known format"),
    "1-pixel image": ("x.png", sets.encoded(Image.new("RGB", (1, 1))), b"c", (1, 1)),
    "20,000-pixel panorama": ("x.jpg", sets.encoded(Image.new("RGB", (20_000, 40), RED), "JPEG"),
                              b"c", (20_000, 40)),
    "decompression bomb": ("x.png", huge_png(), b"c", "the picture is too large"),
    "non-UTF-8 caption": ("x.jpg", JPEG, b"caf\xe9", "not UTF-8 text"),
    "empty caption": ("x.jpg", JPEG, b" \n", "it has no caption"),
    "missing pair": ("x.jpg", JPEG, None, "it has no caption"),
}


def write_source(folder: Path, name: str, data: bytes, text: bytes | None) -> Path:
    """A good picture and the odd one."""
    folder.mkdir()
    (folder / "good.png").write_bytes(sets.encoded(sets.picture()))
    (folder / "good.txt").write_text("a good picture")
    (folder / name).write_bytes(data)
    if text is not None:
        (folder / name).with_suffix(".txt").write_bytes(text)
    return folder


def run(*arguments) -> int:
    return command.run(ingest.main, [str(a) for a in arguments])


@pytest.mark.parametrize("kind", PICTURES)
def test_packing_takes_it_or_names_it(tmp_path, capsys, kind):
    name, data, text, expected = PICTURES[kind]
    source = write_source(tmp_path / "src", name, data, text)
    out = tmp_path / "out"
    assert run("--src", source, "--dst", out) == 0
    found = {record.key: record for record in Dataset(out)}
    if isinstance(expected, tuple):
        assert (found["x"].width, found["x"].height) == expected and found["x"].image == data
        return
    assert set(found) == {"good"} and Dataset(out).manifest["skipped"] == 1
    row, = map(json.loads, (out / "skipped.jsonl").read_text().splitlines())
    assert row["name"] == name and expected in row["reason"]
    assert name in capsys.readouterr().out
    assert run("--src", source, "--dst", tmp_path / "strict", "--strict") == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("kind, pixel", [
    ("palette with alpha", [[250, 0, 0], [255, 255, 255]]),
    ("animated WebP", [[250, 0, 0], [250, 0, 0]]),
    ("16-bit PNG", [[0, 0, 0], [15, 15, 15]])])
def test_odd_pictures_are_shown_as_documented(tmp_path, kind, pixel):
    name, data, text, (width, height) = PICTURES[kind]
    source = write_source(tmp_path / "src", name, data, text)
    (source / "good.png").unlink()
    assert run("--src", source, "--dst", tmp_path / "out") == 0
    with build_pipeline(str(tmp_path / "out"), 1, buckets="custom",
                        sizes=(f"{width}x{height}",)) as batches:
        image = next(batches)["image"][0]
    shown = np.rint((image + 1) * 127.5).astype(int)
    assert shown[0, [0, width - 1]].tolist() == pixel


def test_pictures_that_fit_no_bucket_are_counted(tmp_path, caplog):
    with DatasetWriter(tmp_path / "set") as writer:
        writer.add(sets.record(0))
        for number, size in enumerate(((1, 1), (20_000, 20)), start=1):
            data = sets.encoded(Image.new("RGB", size))
            writer.add(Record(f"p{number}", "test", *size, {"prompt": "x"}, data))
    with build_pipeline(str(tmp_path / "set"), 1, image_size=24) as batches:
        assert (batches.plan.dropped, batches.steps_per_epoch) == (2, 1)
    assert "2 of 3 pictures are never shown" in caplog.text


def packed_with(folder: Path, data: bytes) -> None:
    """A data set, of another program say, with three good pictures and `data` between them."""
    with DatasetWriter(folder, shard_bytes=1) as writer:
        for number in range(3):
            writer.add(sets.record(number))
        writer.add(Record("odd", "test", 40, 30, {"prompt": "odd"}, data))


BAD = {kind: data for kind, (_, data, _, expected) in PICTURES.items()
       if isinstance(expected, str) and "caption" not in expected and data != JPEG}


@pytest.mark.parametrize("kind", [*BAD, "truncated ArrayRecord", "missing ArrayRecord index"])
def test_an_epoch_goes_on_without_it_unless_strict(tmp_path, caplog, kind):
    folder = tmp_path / "set"
    packed_with(folder, BAD.get(kind, JPEG))
    if kind == "truncated ArrayRecord":
        shard = folder / "shard-00003.arrayrecord"
        shard.write_bytes(shard.read_bytes()[:-500])
    if kind == "missing ArrayRecord index":
        (folder / "shard-00003.index.npz").unlink()
        with pytest.raises(UserError, match="index.*is missing"):
            build_pipeline(str(folder), 2, image_size=24)
        return
    with build_pipeline(str(folder), 2, image_size=24) as batches:
        seen = [key for _ in range(batches.steps_per_epoch) for key in next(batches)["key"]]
        assert len(seen) == 4 and set(seen) <= {"p000", "p001", "p002"}
        assert set(batches.skipped) == {"odd"} and "odd" in caplog.text
    with build_pipeline(str(folder), 2, image_size=24, strict=True) as batches:
        with pytest.raises(UserError):
            for _ in range(batches.steps_per_epoch):
                next(batches)


def test_the_page_has_a_row_for_every_kind():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    rows = set(re.findall(r"^\| ([^|]+?) \|", page, re.MULTILINE))
    missing = {*PICTURES, "truncated tar", "truncated ArrayRecord"} - rows
    assert not missing
