"""Files made to harm: each is refused with one sentence, quickly, and leaves nothing anywhere."""

import io
import json
import os
import struct
import zipfile

import numpy as np
import pytest

from tests.tools import forge
from tools.convert_torch_weights.cli import main
from tools.convert_torch_weights.readers import Unreadable, open_source

FOUR = struct.pack("<4f", 1, 2, 3, 4)
LONG_NUMBER = b"\x8b" + struct.pack("<I", 3000) + b"\x7f" * 3000  # LONG4
LIST = b"](" + b"K\x01" * 50_000 + b"eq\x00"


def number(value: int) -> bytes:
    data = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


PROGRAMS = {
    "key nested until hashing it overflows the stack": (
        b"\x80\x02})" + b"\x85" * 50_000 + b"Ns.", "damaged"),
    "the same key in pairs": (
        b"\x80\x02ccollections\nOrderedDict\n])" + b"\x85" * 50_000 + b"N\x86a\x85R.", "damaged"),
    "one long list copied by many calls": (
        b"\x80\x02" + LIST + b"ctorch\nSize\nq\x01" + b"h\x01h\x00\x85R0" * 1000 + b".",
        "again and again"),
    "endless arguments": (
        b"\x80\x02" + LIST + b"ctorch\nstrided\nq\x01" + b"h\x01h\x00R0" * 1000 + b".",
        "50,000 arguments"),
    "number too long to print": (forge.dictionary(a=LONG_NUMBER), None),
    "number too long to print as a key": (b"\x80\x02}" + LONG_NUMBER + b"Ns.", None),
    "number too long to print as a size": (
        forge.dictionary(w=forge.tensor(LONG_NUMBER + b"\x85")), "damaged"),
    "size beyond 64 bits": (forge.dictionary(w=forge.tensor(number(1 << 64) + b"\x85")), "damaged"),
    "sizes whose product overflows": (forge.dictionary(w=forge.tensor(
        number(1 << 32) + number(1 << 32) + b"\x86", number(1 << 32) + b"K\x01\x86")), "key 'w'"),
    "place that is no integer": (forge.dictionary(
        w=forge.tensor().replace(b"J\0\0\0\0", b"G\0\0\0\0\0\0\0\0")), "damaged"),
    "reference nested deeply": (
        b"\x80\x02}X\x01\x00\x00\x00a)" + b"\x85" * 20_000 + b"Qs.", None),
    "calls nested in calls": (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\nq\x000" + b"(h\x00h\x00N" * 5000
        + b")Nt" + b"Nt" * 4999 + b"q\x010h\x00h\x01R.", "damaged"),
    "name that moves the cursor": (
        b"\x80\x04" + b"\x8c\x02os\x8c\x0ca\nb\x1b[2Jerror\x93.", r"os.a\nb\x1b[2Jerror"),
    "doubled key": (forge.dictionary(w=forge.tensor()).replace(b"u.", forge.text("w") + b"Nu."),
                    "twice"),
    "two ways to one name": (
        b"\x80\x02}(" + forge.text("a") + b"}(" + forge.text("b") + forge.tensor() + b"u"
        + forge.text("a.b") + forge.tensor() + b"u.", "key 'a.b'"),
    "one number repeated without end": (
        forge.dictionary(w=forge.tensor(number(1 << 40) + b"\x85", b"K\x00\x85")),
        "4,398,046,511,104 bytes, more than 16 times"),
    "name that is not printable": (
        b"\x80\x02}(" + forge.text("a\n\x1b[2J") + forge.tensor() + b"u.", r"a\n\x1b[2J"),
    "name of half a character": (
        b"\x80\x02}(X\x03\x00\x00\x00\xed\xa0\x80" + forge.tensor() + b"u.", r"\ud800"),
    "name that is too long": (
        b"\x80\x02}(" + forge.text("a" * 1000) + forge.tensor() + b"u.", "too long"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(tmp_path, capsys, name):
    program, reason = PROGRAMS[name]
    path = forge.torch_zip(tmp_path / "hostile.pth", program, {"data/0": FOUR})
    refused_by_the_command(path, capsys, reason)


def refused_by_the_command(path, capsys, reason: str | None) -> None:
    """Converting exits with 2 and one sentence; where it may be opened, inspecting works."""
    folder, before = path.parent, sorted(path.parent.iterdir())
    arguments = ["--src", str(path), "--dst", str(folder / "out"), "--model", "pixeldit_t2i"]
    assert main(["convert", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and error.isascii()
    assert str(path.name) in error and len(error) < 2000 and error[:-1].isprintable()
    assert main(["inspect", str(path)]) == (0 if reason is None else 2)
    assert reason is None or reason in error
    assert sorted(folder.iterdir()) == before


# ---- archives

def archive(path, change=lambda content: content, **members):
    buffer = forge.torch_zip(io.BytesIO(), forge.dictionary(w=forge.tensor()),
                             {"data/0": FOUR, **members})
    path.write_bytes(change(buffer.getvalue()))
    return path


def with_flag(content: bytes) -> bytes:
    """Marks the numbers as encrypted in the list of members."""
    at = content.index(b"PK\x01\x02", content.index(b"PK\x01\x02") + 4)
    return content[:at + 8] + b"\x01" + content[at + 9:]


@pytest.mark.parametrize("change, reason", [
    (with_flag, "encrypted"),
    (lambda content: content[:len(content) // 2], "cut short"),
    (lambda content: content[:-1], "cut short"),
    (lambda content: content.replace(b"archive/data/0", b"archive/data\xff0"), "damaged"),
])
def test_archives(tmp_path, capsys, change, reason):
    refused_by_the_command(archive(tmp_path / "hostile.pth", change), capsys, reason)


def test_doubled_members(tmp_path, capsys):
    path = archive(tmp_path / "hostile.pth")
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "a") as opened:
        opened.writestr("archive/data/0", FOUR[::-1])
    refused_by_the_command(path, capsys, "the same name")


def test_a_bomb_is_not_inflated(tmp_path, capsys):
    path = forge.torch_zip(tmp_path / "bomb.pth", forge.dictionary(w=forge.tensor()),
                           {"data/0": bytes(50 << 20)}, zipfile.ZIP_DEFLATED)
    refused_by_the_command(path, capsys, "compressed")


def test_many_names_for_one_storage(tmp_path, capsys):
    program = forge.dictionary(**{f"w{i}": forge.tensor(b"J\x00\x00\x01\x00\x85", count=1 << 16)
                                  for i in range(800)})
    path = forge.torch_zip(tmp_path / "x.pth", program, {"data/0": bytes(4 << 16)})
    refused_by_the_command(path, capsys, "more than 16 times")


def test_a_member_of_five_gigabytes(tmp_path):
    """The numbers of one tensor may lie beyond 4 GB; the file is sparse."""
    size = 5 << 30
    path = tmp_path / "large.pth"
    tensor = forge.tensor(number(size) + b"\x85", kind="ByteStorage", count=4)
    with open(path, "wb") as file, zipfile.ZipFile(file, "w") as opened:
        member = zipfile.ZipInfo("archive/data/0")
        member.file_size = member.compress_size = size
        member.header_offset = member.CRC = 0
        file.write(member.FileHeader(zip64=True))
        file.seek(size - 1, os.SEEK_CUR)
        file.write(b"\x07")
        opened.filelist.append(member)
        opened.NameToInfo[member.filename] = member
        opened.start_dir, opened._didModify = file.tell(), True
        opened.writestr("archive/data.pkl", forge.dictionary(w=tensor))
    value = open_source(path).tensors["w"].read()
    assert value.shape == (size,) and value[-1] == 7 and value[0] == 0


# ---- other forms

SAFETENSORS = {
    "name of half a character": ({"\ud800": {"dtype": "F32", "shape": [4],
                                             "data_offsets": [0, 16]}}, r"\ud800"),
    "name of two lines": ({"a\nb": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}},
                          r"a\nb"),
    "size beyond 64 bits": ({"w": {"dtype": "F32", "shape": [1 << 70, 0],
                                   "data_offsets": [0, 0]}}, "does not fill"),
    "sizes that are lists": ({"w": {"dtype": "F32", "shape": [[4]], "data_offsets": [0, 16]}},
                             "does not fill"),
    "entry nested deeply": ({"w": json.loads("[" * 500 + "]" * 500)}, "not understood"),
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors(tmp_path, capsys, name):
    header, reason = SAFETENSORS[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(forge.header(header, FOUR))
    refused_by_the_command(path, capsys, reason)


@pytest.mark.parametrize("weight_map, reason", [
    ('{"w": "/etc/passwd"}', "outside the folder"), ('{"w": ".."}', "outside the folder"),
    ('{"w": ""}', "outside the folder"), ('{"w": "a\\u0000b"}', "outside the folder"),
    ('{"w": "%s"}' % ("a" * 300), "outside the folder"),
    ('{"w": "deeper/one.safetensors"}', "outside the folder"),
    ('{"w": "one.safetensors", "w": "two.safetensors"}', "no index"),
    ('{"w": "one.safetensors"}', "does not list 'v' of one.safetensors"),
])
def test_indices(tmp_path, weight_map, reason):
    forge.save(tmp_path / "one.safetensors", {name: np.zeros(2, np.float32) for name in "wv"})
    index = tmp_path / "x.safetensors.index.json"
    index.write_text('{"weight_map": %s}' % weight_map)
    with pytest.raises(Unreadable, match=reason):
        open_source(index)


def test_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.pth")
    with pytest.raises(Unreadable, match="no regular file"):
        open_source(tmp_path / "pipe.pth")
    (tmp_path / "folder.pth").mkdir()
    with pytest.raises(Unreadable, match="not exactly one"):
        open_source(tmp_path / "folder.pth")


def distributed(tmp_path):
    return forge.distributed(tmp_path / "model", [(0, np.zeros((2, 4), np.float32))], rows=2)


@pytest.mark.parametrize("program, reason", [
    (b"\x80\x02cos\nsystem\n" + forge.text("touch PWNED") + b"\x85R.", "os.system"),
    (forge.dictionary(w=forge.tensor()), "not one tensor"),
    (b"\x80\x02" + forge.tensor() + b".", "the index says"),
])
def test_pieces_of_a_distributed_checkpoint(tmp_path, monkeypatch, program, reason):
    monkeypatch.chdir(tmp_path)
    folder = distributed(tmp_path)
    piece = folder / "__0_0.distcp"
    payload = forge.torch_zip(io.BytesIO(), program, {"data/0": FOUR}).getvalue()
    piece.write_bytes(payload + bytes(2000))
    index = (folder / ".metadata").read_bytes()
    length = index.index(b"length") + len("length")
    (folder / ".metadata").write_bytes(
        index[:length + 1] + struct.pack("<i", len(payload)) + index[length + 5:])
    with pytest.raises(Unreadable, match=reason):
        open_source(folder).tensors["net.w"].read()
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("old, new, reason", [
    (forge.text("__0_0.distcp"), forge.text("../../x.dist"), "outside the folder"),
    (b"offsetK\x00", b"offsetN", "unknown form"),
    (forge.size(2, 4), forge.size(-2, -4), "do not make up"),
    (forge.size(2, 4), forge.size(1 << 30, 1 << 30), "do not make up|says"),
])
def test_indices_of_distributed_checkpoints(tmp_path, old, new, reason):
    folder = distributed(tmp_path)
    index = (folder / ".metadata").read_bytes()
    assert old in index
    (folder / ".metadata").write_bytes(index.replace(old, new, 1))
    with pytest.raises(Unreadable, match=reason):
        open_source(folder).tensors["net.w"].read()
