import csv
import json
import os
import subprocess
import sys

import pytest
from PIL import Image

from pid_jax.data import command
from pid_jax.data.dataset import Dataset
from pid_jax.data.destination import destination
from pid_jax.data.ingest import __main__ as ingest
from pid_jax.data.ingest import pack
from pid_jax.data.ingest.folder import named
from pid_jax.errors import UserError
from tests.data import sets
from tests.test_images import huge_png


@pytest.fixture
def photos(tmp_path):
    """Three captioned pictures, one in a folder of its own."""
    source = tmp_path / "photos"
    (source / "deep").mkdir(parents=True)
    for number, name in enumerate(("a.png", "b.jpg", "deep/c.png")):
        kind = "JPEG" if name.endswith("jpg") else "PNG"
        (source / name).write_bytes(sets.encoded(sets.picture(seed=number), kind))
    (source / "a.txt").write_text(" a cat\n")
    (source / "b.json").write_text(json.dumps({"prompt": "long", "prompt_short": "s", "id": 3}))
    (source / "deep" / "c.json").write_text('"just a string"')
    return source


def run(*arguments) -> int:
    return command.run(ingest.main, [str(a) for a in arguments])


def packed(tmp_path, source, *options) -> Dataset:
    assert run("--src", source, "--dst", tmp_path / "out", *options) == 0
    return Dataset(tmp_path / "out")


def records(data) -> dict:
    return {record.key: record for record in (data[i] for i in range(len(data)))}


def skipped(tmp_path) -> dict:
    lines = (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()
    return {row["name"]: row["reason"] for row in map(json.loads, lines)}


def test_a_folder_with_sidecars(tmp_path, photos, capsys):
    found = records(packed(tmp_path, photos))
    assert list(found) == ["a", "b", "deep/c"]
    assert found["a"].captions == {"prompt": "a cat"}
    assert found["b"].captions == {"prompt": "long", "prompt_short": "s"}
    assert found["deep/c"].captions == {"prompt": "just a string"}
    assert found["b"].image == (photos / "b.jpg").read_bytes()
    assert {r.source for r in found.values()} == {"photos"}
    assert "packed 3 pictures" in capsys.readouterr().out
    assert not (tmp_path / "out" / "skipped.jsonl").exists()


def test_names_sources_and_shard_sizes(tmp_path, photos):
    data = packed(tmp_path, photos, "--source", "mine", "--shard-size-mb", "0.0001")
    assert data.manifest["sources"] == {"mine": 3} and len(data.manifest["shards"]) == 3


def test_a_jsonl_table(tmp_path, photos):
    table = tmp_path / "captions.jsonl"
    table.write_text("\ufeff" + "\n".join(map(json.dumps, [
        {"file_name": "a.png", "text": "from the table"},
        {"image": "./deep/../deep/c.png", "caption": {"prompt": "nested"}}, ])) + "\n\n")
    data = packed(tmp_path, photos, "--captions", table)
    assert {k: dict(r.captions) for k, r in records(data).items()} == {
        "a": {"prompt": "from the table"}, "deep/c": {"prompt": "nested"}}
    assert "no caption" in skipped(tmp_path)["b.jpg"]


def test_a_csv_table(tmp_path, photos):
    table = tmp_path / "captions.csv"
    with open(table, "w", newline="") as file:
        csv.writer(file).writerows([["file", "prompt", "prompt_short"],
                                    ["a.png", "two\nlines", "short"], ["b.jpg", "only, one", ""]])
    found = records(packed(tmp_path, photos, "--captions", table))
    assert found["a"].captions == {"prompt": "two\nlines", "prompt_short": "short"}
    assert found["b"].captions == {"prompt": "only, one"}


def test_bad_rows_of_a_table_are_named(tmp_path, photos):
    table = tmp_path / "captions.jsonl"
    (tmp_path / "secret.png").write_bytes(sets.encoded(sets.picture()))
    table.write_bytes(b"\n".join([
        b'{"file": "a.png", "text": "good"}', b"{not json", b"[1]", b'{"text": "no file"}',
        b'{"file": "../secret.png", "text": "x"}', b'{"file": "/etc/passwd", "text": "x"}',
        b'{"file": "lost.png", "text": "x"}', b'{"file": "a.png", "text": "again"}',
        b'{"file": "b.jpg", "text": "\xff\xfe"}', b'{"file": "..\\\\secret.png", "text": "x"}',
        b'{"file": "deep/c.png", "text": "\\ud800"}', b'{"file": 7}', b"[" * 20_000,
        b'{"file": "a.txt", "text": "not a picture"}',
        b'{"file": "%s", "text": "too long a name"}' % (b"x" * 5000)]))
    data = packed(tmp_path, photos, "--captions", table)
    assert list(records(data)) == ["a"]
    reasons = skipped(tmp_path)
    for line, words in ((2, "not JSON"), (3, "not a JSON object"), (4, "names no picture"),
                        (5, "leaves the folder"), (6, "leaves the folder"), (7, "not in"),
                        (8, "listed twice"), (9, "not UTF-8"), (10, "leaves the folder"),
                        (12, "names no picture"), (13, "not JSON"), (14, "not among the pictures"),
                        (15, "not in")):
        assert words in reasons[f"captions.jsonl line {line}"], line
    assert "UTF-8" in reasons["deep/c.png"] and "no caption" in reasons["b.jpg"]


@pytest.mark.parametrize("name, content, words", [
    ("zero.png", b"", "empty"),
    ("text.jpg", b"not a picture", "not a picture"),
    ("half.png", sets.encoded(sets.picture(300, 200))[:4000], "damaged"),
    ("bomb.png", huge_png(), "too large"),
    ("float.tif", sets.encoded(Image.new("F", (9, 9)), "TIFF"), "32-bit")])
def test_bad_pictures_are_skipped_and_named(tmp_path, photos, capsys, name, content, words):
    (photos / name).write_bytes(content)
    (photos / name).with_suffix(".txt").write_text("caption")
    assert len(packed(tmp_path, photos)) == 3
    assert words in skipped(tmp_path)[name]
    out = capsys.readouterr().out
    assert "skipped 1" in out and name in out


@pytest.mark.parametrize("mode, kind", [
    ("CMYK", "JPEG"), ("P", "PNG"), ("I;16", "PNG"), ("LA", "PNG"), ("1", "PNG"), ("RGB", "WEBP")])
def test_unusual_pictures_are_packed(tmp_path, mode, kind):
    source = tmp_path / "src"
    source.mkdir()
    image = Image.new("I;16", (40, 30), 3000) if mode == "I;16" else sets.picture().convert(mode)
    (source / "x.png").write_bytes(sets.encoded(image, kind))
    (source / "x.txt").write_text("unusual")
    assert records(packed(tmp_path, source))["x"].captions == {"prompt": "unusual"}


def test_sizes_are_those_seen_upright(tmp_path, photos):
    exif = Image.Exif()
    exif[0x0112] = 6
    (photos / "a.png").write_bytes(sets.encoded(sets.picture(), exif=exif))
    record = records(packed(tmp_path, photos))["a"]
    assert (record.width, record.height) == (30, 40)


@pytest.mark.parametrize("content, words", [
    (b"\xff\xfe\x00caption", "not UTF-8"), (b"", "no caption"), (b"  \n", "no caption")])
def test_bad_text_sidecars(tmp_path, photos, content, words):
    (photos / "a.txt").write_bytes(content)
    assert len(packed(tmp_path, photos)) == 2
    assert words in skipped(tmp_path)["a.png"]


def test_a_name_without_room_for_that_of_a_caption(tmp_path, photos):
    longest = "x" * 251 + ".jpg"  # no .json beside it could have a name
    (photos / longest).write_bytes((photos / "a.png").read_bytes())
    assert len(packed(tmp_path, photos)) == 3
    assert "no caption" in skipped(tmp_path)[longest]


@pytest.mark.parametrize("content, words", [
    ("{", "not valid JSON"), ("[]", "no caption"), ("3", "no caption"), ("{}", "no caption"),
    ("[" * 50_000, "not valid JSON"), ('{"prompt": "\\ud800"}', "UTF-8")])
def test_bad_json_sidecars(tmp_path, photos, content, words):
    (photos / "b.json").write_text(content)
    assert len(packed(tmp_path, photos)) == 2
    assert words in skipped(tmp_path)["b.jpg"]


def test_pictures_without_captions_can_be_packed(tmp_path, photos):
    (photos / "a.txt").unlink()
    found = records(packed(tmp_path, photos, "--missing-captions", "empty"))
    assert found["a"].captions == {} and len(found) == 3


def test_small_pictures_can_be_left_out(tmp_path, photos):
    (photos / "a.png").write_bytes(sets.encoded(sets.picture(90, 80)))
    assert list(records(packed(tmp_path, photos, "--min-side", 64))) == ["a"]
    assert "40 x 30" in skipped(tmp_path)["b.jpg"]


def test_duplicate_keys_are_skipped(tmp_path, photos):
    (photos / "a.webp").write_bytes(sets.encoded(sets.picture(), "WEBP"))
    assert len(packed(tmp_path, photos)) == 3
    assert "duplicate key 'a'" in skipped(tmp_path)["a.webp"]


def test_links_hidden_and_special_files(tmp_path, photos):
    (tmp_path / "secret.png").write_bytes(sets.encoded(sets.picture()))
    (tmp_path / "elsewhere").mkdir()
    (photos / ".hidden.png").write_bytes(b"ignored")
    os.symlink(tmp_path / "secret.png", photos / "link.png")
    os.symlink(tmp_path / "elsewhere", photos / "folder")
    os.symlink(photos / "nothing.png", photos / "dangling.png")
    os.mkfifo(photos / "pipe.png")
    os.symlink(photos / "a.png", photos / "inside.png")
    (photos / "inside.txt").write_text("a link within the folder")
    (photos / "a.txt").unlink()
    os.symlink(tmp_path / "secret.png", photos / "a.txt")
    assert set(records(packed(tmp_path, photos))) == {"b", "deep/c", "inside"}
    reasons = skipped(tmp_path)
    assert set(reasons) == {"link.png", "folder", "dangling.png", "pipe.png", "a.png"}
    assert "leaves the folder" in reasons["link.png"] and "leaves" in reasons["a.png"]


def test_unreadable_files_are_skipped(tmp_path):
    def refuse():
        raise PermissionError(13, "Permission denied")

    good = pack.Item("good", "good.png", lambda: sets.encoded(sets.picture()), dict)
    summary = pack.pack([pack.Item("bad", "bad.png", refuse, dict), good], tmp_path / "out",
                        "test", 1 << 20)
    assert summary.packed == 1 and "Permission denied" in skipped(tmp_path)["bad.png"]


def test_undecodable_file_names(tmp_path, photos, capsys):
    name = os.fsdecode(b"\xff\xfe.png")
    (photos / name).write_bytes(sets.encoded(sets.picture()))
    (photos / os.fsdecode(b"\xff\xfe.txt")).write_text("caption")
    assert len(packed(tmp_path, photos)) == 3
    assert "UTF-8" in skipped(tmp_path)[name] and "\\udcff" in capsys.readouterr().out


def fails(capsys, *arguments) -> str:
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_mistaken_calls(tmp_path, photos, capsys):
    out = tmp_path / "out"
    (tmp_path / "none").mkdir()
    (tmp_path / "x.xlsx").write_text("")
    (tmp_path / "x.parquet").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.doc").write_text("")
    for source, options, words in (
            (tmp_path / "nowhere", (), "nowhere is not a folder"),
            (photos / "a.png", (), "not a folder"),
            (tmp_path / "none", (), "holds no pictures"),
            (photos, ("--captions", tmp_path / "lost.jsonl"), "lost.jsonl cannot be read"),
            (photos, ("--captions", tmp_path / "x.xlsx"), "neither .jsonl nor .csv"),
            (photos, ("--captions", tmp_path / "x.parquet"), "x.parquet cannot be read"),
            (photos, ("--format", "zip"), "zip"),
            (photos, ("--format", "webdataset"), "holds no .tar files"),
            (photos, ("--format", "list"), "is a folder"),
            (tmp_path / "x.xlsx", ("--format", "list"), "is neither"),
            (photos, ("--format", "multiaspect"), "--images is missing"),
            (photos, ("--dst", tmp_path / "mine"), "thesis.doc"),
            (photos, ("--shard-size-mb", "0"), "not above 0"),
            (photos, ("--min-side", "many"), "min-side"),
            (photos, ("--capt", "x"), "--capt")):
        assert words in fails(capsys, "--src", source, "--dst", out, *options)
        assert not out.exists()


def test_a_second_run_adds_what_is_new_and_repeats_nothing(tmp_path, photos, capsys):
    before = packed(tmp_path, photos)
    files = {f.name: f.read_bytes() for f in before.folder.iterdir()}
    again = packed(tmp_path, photos)
    assert "3 of them were there already" in capsys.readouterr().out
    assert {f.name: f.read_bytes() for f in again.folder.iterdir()} == files
    (photos / "b2.png").write_bytes(sets.encoded(sets.picture(seed=9)))
    (photos / "b2.txt").write_text("a new one")
    grown = packed(tmp_path, photos)
    assert list(records(grown)) == ["a", "b", "deep/c", "b2"]
    assert grown.manifest["shards"][:1] == before.manifest["shards"]
    assert "packed otherwise" in fails(capsys, "--src", photos, "--dst", tmp_path / "out",
                                       "--min-side", 20)


def test_an_existing_set_is_replaced_as_a_whole_or_not_at_all(tmp_path, photos, capsys):
    packed(tmp_path, photos)
    (photos / "a.png").unlink()
    assert len(packed(tmp_path, photos, "--overwrite")) == 2
    for file in photos.rglob("*.*"):
        file.write_bytes(b"")
    assert "none of 2" in fails(
        capsys, "--src", photos, "--dst", tmp_path / "out", "--overwrite")
    assert len(Dataset(tmp_path / "out")) == 2


def test_a_killed_run_is_continued_to_the_same_data_set(tmp_path, photos):
    whole = packed(tmp_path, photos, "--shard-size-mb", "0.0001")
    process = subprocess.run([sys.executable, "-c", KILLED, photos, tmp_path / "cut"])
    assert process.returncode == -9
    assert [p.name for p in (tmp_path / "cut").glob(".shard-*.part")]
    assert not Dataset(tmp_path / "cut").manifest["complete"]
    assert run("--src", photos, "--dst", tmp_path / "cut") == 0
    cut = Dataset(tmp_path / "cut")
    assert records(cut) == records(whole) and cut.fingerprint == whole.fingerprint
    assert cut.manifest["complete"] and not list((tmp_path / "cut").glob(".*"))


KILLED = """
import os, signal, sys
from pid_jax.data import dataset
from pid_jax.data.ingest import __main__ as ingest
add = dataset.DatasetWriter.add
def add_or_die(self, record):
    self._shard_bytes = 1 if record.key == "a" else 1 << 20
    add(self, record)
    if record.key == "b":
        os.kill(os.getpid(), signal.SIGKILL)
dataset.DatasetWriter.add = add_or_die
ingest.main(["--src", sys.argv[1], "--dst", sys.argv[2]])
"""


def test_the_number_of_workers_changes_nothing(tmp_path):
    items = [pack.Item(f"k{i}", f"k{i}.png", lambda i=i: b"" if i % 5 == 3 else sets.encoded(
        sets.picture(seed=i)), lambda i=i: {"prompt": f"number {i}"}) for i in range(20)]
    sets_of = {}
    for workers in (1, 2, 5):
        folder = tmp_path / str(workers)
        pack.pack(items, folder, "test", 4000, workers=workers)
        sets_of[workers] = {f.name: f.read_bytes() for f in folder.iterdir()}
    assert sets_of[1] == sets_of[2] == sets_of[5] and len(sets_of[1]) > 4


def test_strict_runs_end_at_the_first_bad_item(tmp_path, photos, capsys):
    (photos / "b.jpg").write_bytes(b"")
    error = fails(capsys, "--src", photos, "--dst", tmp_path / "out", "--strict")
    assert "b.jpg" in error and "empty" in error


def test_the_manifest_counts_what_was_done(tmp_path, photos):
    (photos / "b.jpg").write_bytes(b"")
    manifest = packed(tmp_path, photos).manifest
    assert manifest["skipped"] == 1 and manifest["buckets"] == {"4,3": 2}
    assert manifest["recipe"]["kind"] == "folder"


def test_two_processes_do_not_pack_into_one_folder(tmp_path, photos):
    with destination(tmp_path / "out", False), pytest.raises(UserError, match="another process"):
        with destination(tmp_path / "out", False):
            pass


def test_nothing_packed_leaves_nothing(tmp_path, photos, capsys):
    for file in photos.rglob("*.*"):
        file.write_bytes(b"")
    error = fails(capsys, "--src", photos, "--dst", tmp_path / "out")
    assert "none of 3 items" in error and "a.png" in error
    assert not (tmp_path / "out").exists()


def test_an_interruption_keeps_what_was_packed(tmp_path):
    def items():
        yield pack.Item("one", "one", lambda: sets.encoded(sets.picture()), dict)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), destination(tmp_path / "out", False) as folder:
        pack.pack(items(), folder, "test", 1 << 20)
    assert len(Dataset(tmp_path / "out")) == 1


@pytest.mark.parametrize("value, expected", [
    ("text", {"prompt": "text"}), ({"en_caption": "e"}, {"prompt": "e"}),
    ({"prompt": "p", "text": "t"}, {"prompt": "p"}), ({"prompt": " ", "text": "t"},
    {"prompt": "t"}), (None, {}), ({"caption": 5}, {})])
def test_caption_forms(value, expected):
    assert named(value) == expected


def test_the_command_runs(tmp_path, photos):
    done = subprocess.run([sys.executable, "-m", "pid_jax.data.ingest", "--src", photos, "--dst",
                           tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("packed 3") and not done.stderr
