import json
import tarfile

import pytest

from pid_jax.data import command
from pid_jax.data.dataset import Dataset
from pid_jax.data.ingest import __main__ as ingest
from pid_jax.data.ingest import webdataset
from tests.data import sets


def pack(source, out, *options) -> dict:
    """Packs and gives the records by key."""
    assert command.run(ingest.main, ["--format", "webdataset", "--src", str(source), "--dst",
                                     str(out), *options]) == 0
    return {record.key: record for record in Dataset(out)}


def skipped(out) -> dict:
    rows = map(json.loads, (out / "skipped.jsonl").read_text().splitlines())
    return {row["name"]: row["reason"] for row in rows}


def jpeg(seed) -> bytes:
    return sets.encoded(sets.picture(seed=seed), "JPEG")


def caption(text) -> bytes:
    return json.dumps({"prompt": text, "prompt_short": text[:3]}).encode()


@pytest.mark.parametrize("ratio", ["", "aspect_ratio_4_3/"])
def test_the_references_pairs_of_tars(tmp_path, ratio):
    root = tmp_path / "root"
    for number in range(2):
        names = [f"set__{number}{i}" for i in range(3)]
        part = f"part_000000/00000{number}.tar"
        sets.tar(root / f"{ratio}image" / part,
                 {f"{n}.{suffix}": jpeg(i) for i, (n, suffix) in enumerate(
                     zip(names, ("jpg", "JPG", "jpeg")))})
        sets.tar(root / f"{ratio}caption" / part, {f"{n}.json": caption(n) for n in names})
    (root / "wdinfo.json").write_text("{}")
    found = pack(root, tmp_path / "out")
    assert list(found) == [f"set__{n}{i}" for n in range(2) for i in range(3)]
    assert found["set__11"].captions == {"prompt": "set__11", "prompt_short": "set"}
    assert found["set__02"].image == jpeg(2) and found["set__02"].source == "root"
    assert not (tmp_path / "out" / "skipped.jsonl").exists()


def test_single_tars(tmp_path):
    sets.tar(tmp_path / "src" / "deep" / "a.tar", {
        "x/one.jpg": jpeg(0), "x/one.txt": b"first", "x/one.vae.npy": b"ignored",
        "two.json": caption("second"), "two.png": sets.encoded(sets.picture()),
        "three.jpg": jpeg(1), "three.cls": b"7", "readme.md": b"no sample"})
    found = pack(tmp_path / "src", tmp_path / "out")
    assert {key: record.captions for key, record in found.items()} == {
        "x/one": {"prompt": "first"}, "two": {"prompt": "second", "prompt_short": "sec"},
        "three": {"label": "7"}}
    assert list(pack(tmp_path / "src" / "deep" / "a.tar", tmp_path / "file")) == list(found)


def test_what_is_missing_or_odd_is_named(tmp_path):
    root = tmp_path / "src"
    link = tarfile.TarInfo()
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    sets.tar(root / "image" / "0.tar", {"good.jpg": jpeg(0), "alone.jpg": jpeg(1)})
    sets.tar(root / "caption" / "0.tar", {"good.json": caption("g"), "lost.json": caption("l"),
                                          "latin.json": b'{"prompt": "caf\xe9"}'})
    sets.tar(root / "image" / "1.tar", {"no_caption_tar.jpg": jpeg(2)})
    sets.tar(root / "caption" / "2.tar", {"no_image_tar.json": caption("n")})
    sets.tar(root / "odd.tar", {
        "../escape.jpg": jpeg(3), "/root.jpg": jpeg(3), "link.jpg": link, "a.txt": b"lonely",
        "b.jpg": jpeg(4), "b.png": jpeg(4), "b.txt": b"", "good.jpg": jpeg(5), "good.txt": b"x",
        "latin.jpg": jpeg(6), "latin.txt": b"caf\xe9", "bad.jpg": b"x", "bad.json": b"{",
        "class.jpg": jpeg(7), "class.cls": b"\xff"})
    (root / "zip.tar").write_bytes(b"PK not a tar" * 99)
    (root / "empty.tar").write_bytes(b"")
    assert set(pack(root, tmp_path / "out")) == {"good"}
    reasons = skipped(tmp_path / "out")
    for name, words in {
            "image/0.tar/alone.jpg": "no caption", "image/1.tar/no_caption_tar.jpg": "no caption",
            "caption/0.tar/lost": "no picture", "caption/0.tar/latin": "no picture",
            "caption/1.tar": "is missing", "caption/2.tar": "no image/2.tar",
            "odd.tar/../escape.jpg": "leaves the folder", "odd.tar//root.jpg": "leaves the folder",
            "odd.tar/link.jpg": "no plain file", "odd.tar/a": "no picture",
            "odd.tar/b.png": "a picture already", "odd.tar/b.jpg": "no caption",
            "odd.tar/good.jpg": "duplicate key", "odd.tar/latin.jpg": "not UTF-8",
            "odd.tar/bad.jpg": "not valid JSON",
            "odd.tar/class.jpg": "its class class.cls is not UTF-8", "zip.tar": "cannot be read",
            "empty.tar": "cannot be read"}.items():
        assert words in reasons.pop(name), name
    assert not reasons
    assert not list(tmp_path.rglob("*.jpg"))


@pytest.mark.parametrize("keep, packed, words", [
    (-10240, 3, "no end mark"), (3700, 1, "the tar ends in the middle"),
    (100, 0, "cannot be read")])
def test_a_truncated_tar_gives_what_is_whole(tmp_path, keep, packed, words):
    source = sets.tar(tmp_path / "src" / "a.tar", {
        name: jpeg(i) if name.endswith("jpg") else b"caption" for i, name in enumerate(
            ("a.txt", "a.jpg", "b.jpg", "b.txt", "c.jpg", "c.txt"))})
    sets.tar(tmp_path / "src" / "b.tar", {"z.jpg": jpeg(9), "z.txt": b"the next tar"})
    data = source.read_bytes()
    end = len(data.rstrip(b"\0")) // 512 * 512 + 512
    source.write_bytes(data[:end] if keep < 0 else data[:keep])
    assert len(pack(tmp_path / "src", tmp_path / "out")) == packed + 1
    assert any(words in reason for reason in skipped(tmp_path / "out").values())


def test_an_interrupted_conversion_goes_on(tmp_path):
    for number in range(3):
        sets.tar(tmp_path / "src" / f"{number}.tar",
                 {f"{number}.jpg": jpeg(number), f"{number}.txt": b"text"})
    whole = pack(tmp_path / "src", tmp_path / "whole")
    last = (tmp_path / "src" / "2.tar").rename(tmp_path / "2.tar")
    pack(tmp_path / "src", tmp_path / "out")
    last.rename(tmp_path / "src" / "2.tar")
    assert pack(tmp_path / "src", tmp_path / "out", "--workers", "3") == whole
    assert Dataset(tmp_path / "out").fingerprint == Dataset(tmp_path / "whole").fingerprint


@pytest.mark.parametrize("relative, expected", [
    ("a/image/p/0.tar", ["a/caption/p/0.tar"]), ("caption/0.tar", ["image/0.tar"]), ("0.tar", []),
    ("image/image/0.tar", ["image/caption/0.tar"])])
def test_the_other_tar_of_a_pair(relative, expected):
    assert webdataset.partners(relative) == expected
