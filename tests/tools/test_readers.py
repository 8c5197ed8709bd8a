"""Readers: every form gives the same tensors; every damaged or hostile file one sentence."""

import json
import re
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from pid_jax.errors import UserError
from tests.golden import cases
from tests.tools import forge
from tools.convert_torch_weights.readers import Unreadable, open_source

FOUR = struct.pack("<4f", 1, 2, 3, 4)


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"a.weight": rng.standard_normal((3, 4)).astype(np.float32),
            "b.bias": rng.standard_normal(5).astype(ml_dtypes.bfloat16),
            "c": np.float32(7.5).reshape(()), "empty": np.zeros((0, 2), np.float32),
            "count": np.arange(6, dtype=np.int64).reshape(2, 3)}


def read(source) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in source.tensors.items()}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
def test_written_files_read_back(tmp_path, name):
    source = open_source(forge.save(tmp_path / name, arrays()))
    assert_same(read(source), arrays())
    assert source.tensors["a.weight"].shape == (3, 4)


def test_safetensors_agree_with_the_library(tmp_path):
    path = forge.save(tmp_path / "x.safetensors", arrays())
    assert_same(load_file(path), arrays())


def test_one_tensor_is_mapped_at_a_time(tmp_path):
    source = open_source(forge.save(tmp_path / "x.safetensors", arrays()))
    value = source.tensors["a.weight"].read()
    assert isinstance(value, np.memmap) or isinstance(value.base, np.memmap)
    assert not value.flags.writeable


def test_indexed_parts(tmp_path):
    first, second = dict(list(arrays().items())[:2]), dict(list(arrays().items())[2:])
    forge.save(tmp_path / "one.safetensors", first)
    forge.save(tmp_path / "two.safetensors", second)
    places = {k: "one.safetensors" for k in first} | {k: "two.safetensors" for k in second}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    for path in (index, tmp_path):
        source = open_source(path)
        assert_same(read(source), arrays())
        assert len(source.files) == 3


def test_nested_contents_and_objects_beside_tensors(tmp_path):
    program = forge.dictionary(
        state_dict=b"}(" + forge.text("a.w") + forge.tensor() + b"u", epoch=b"K\x07",
        optimizer_states=b"](}(" + forge.text("lr") + b"G\x3f\x50\x62\x4d\xd2\xf1\xa9\xfcue",
        scheduler=b"N", where=b"cpathlib\nPosixPath\n(" + forge.text("runs") + b"tR")
    source = open_source(forge.torch_zip(tmp_path / "x.ckpt", program, {"data/0": FOUR}))
    np.testing.assert_array_equal(source.tensors["state_dict.a.w"].read(), [1, 2, 3, 4])
    assert source.other == {"epoch": "7", "optimizer_states.0.lr": "0.001", "scheduler": "None",
                            "where": "'runs'"}


def test_views_of_one_storage(tmp_path):
    program = forge.dictionary(
        transposed=forge.tensor(b"K\x02K\x02\x86", b"K\x01K\x02\x86"),
        tail=forge.tensor(b"K\x02\x85", b"K\x01\x85", first=2))
    source = open_source(forge.torch_zip(tmp_path / "x.pth", program, {"data/0": FOUR}))
    np.testing.assert_array_equal(source.tensors["transposed"].read(), [[1, 3], [2, 4]])
    np.testing.assert_array_equal(source.tensors["tail"].read(), [3, 4])


def test_legacy_stream(tmp_path):
    keys = b"\x80\x02](" + forge.text("0") + b"e."
    stream = forge.legacy(forge.dictionary(w=forge.tensor()), keys,
                          struct.pack("<q", 4) + FOUR)
    (tmp_path / "x.pt").write_bytes(stream)
    np.testing.assert_array_equal(open_source(tmp_path / "x.pt").tensors["w"].read(), [1, 2, 3, 4])


def test_distributed_checkpoint_in_blocks_of_rows(tmp_path):
    whole = np.arange(20, dtype=np.float32).reshape(5, 4)
    folder = forge.distributed(tmp_path / "iter_000000003" / "model",
                               [(0, whole[:2]), (2, whole[2:])], rows=5)
    (tmp_path / "latest_checkpoint.txt").write_text("iter_000000003\n")
    for path in (folder, folder.parent, tmp_path):
        source = open_source(path)
        np.testing.assert_array_equal(source.tensors["net.w"].read(), whole)
        assert [file.name for file in source.files] == [".metadata", "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize("chunks, rows, reason", [
    ([(0, 2)], 5, "do not make up shape"), ([(4, 2)], 2, "do not make up shape"),
    ([(0, 3), (1, 2)], 5, "overlap and leave a part out")])
def test_distributed_blocks_that_do_not_fit(tmp_path, chunks, rows, reason):
    blocks = [(first, np.zeros((count, 4), np.float32)) for first, count in chunks]
    forge.distributed(tmp_path / "model", blocks, rows)
    with pytest.raises(Unreadable, match=f"key 'net.w': .*{reason}"):
        read(open_source(tmp_path / "model"))


def test_distributed_data_file_that_is_missing(tmp_path):
    folder = forge.distributed(tmp_path / "model", [(0, np.zeros((2, 4), np.float32))], 2)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(Unreadable, match="key 'net.w': the data file __0_0.distcp is missing"):
        open_source(folder)


def golden_files():
    return [path for folder in cases.golden_folders() for pattern in ("*.pth", "*.pt", "*.ckpt",
                                                                     "*.bin", "*.safetensors")
            for path in sorted(folder.rglob(pattern)) if not path.name.startswith("bad_")]


@pytest.mark.parametrize("path", golden_files(), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_every_golden_file_is_read(path):
    source = open_source(path)
    assert source.tensors
    if path.suffix == ".safetensors":
        assert_same(read(source), load_file(path))
    else:
        assert all(np.isfinite(value.astype(np.float64)).all() for value in read(source).values())


# ---- hostile and damaged files

PROGRAMS = {
    "runs a shell": (b"cos\nsystem\n(S'touch PWNED'\ntR.", "os.system"),
    "evaluates text": (b"\x80\x02c__builtin__\neval\n" + forge.text("open('PWNED', 'w')")
                       + b"\x85R.", "__builtin__.eval"),
    "hides the call from the value": (
        b"\x80\x02cos\nsystem\n" + forge.text("touch PWNED") + b"\x85R0}.", "os.system"),
    "gets a function by attribute": (
        b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x08builtins\x8c\x04dict\x93"
        b"\x8c\x04keys\x86R.", "builtins.getattr"),
    "sets state of a class": (b"\x80\x02ctorch._dynamo\nConfig\n)\x81}(X\x01\x00\x00\x00aK\x01ub.",
                              "torch._dynamo.Config"),
    "instance opcode": (b"(S'touch PWNED'\nios\nsystem\n.", "INST"),
    "extension registry": (b"\x80\x02\x82\x01.", "EXT1"),
    "wrong arguments to a known name": (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nK\x01\x85R.", "damaged"),
    "dict inside itself": (b"\x80\x02}q\x00(X\x01\x00\x00\x00ah\x00u.", "without end"),
    "lists that double": (b"\x80\x02]q\x00K\x01a" + b"".join(
        b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(60)) + b".", "without end"),
    "text of four gigabytes": (b"\x80\x02X\xff\xff\xff\xff.", "4294967295 bytes"),
    "no memo entry": (b"\x80\x02h\x09.", "damaged"),
    "stack that is empty": (b"\x80\x02R.", "damaged"),
    "no end": (b"\x80\x02}", "cut short"),
    "unknown tensor type": (forge.dictionary(w=forge.tensor(kind="QInt8Storage")), "QInt8Storage"),
    "tensor beyond its storage": (forge.dictionary(w=forge.tensor(b"K\x05\x85")), "key 'w'"),
    "negative stride": (forge.dictionary(w=forge.tensor(strides=b"J\xff\xff\xff\xff\x85")),
                        "key 'w'"),
    "storage outside the archive": (forge.dictionary(w=forge.tensor(key="../../secret")),
                                    "key 'w'"),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("form", ["zip", "legacy", "raw"])
def test_hostile_pickles_are_refused(tmp_path, monkeypatch, name, form):
    monkeypatch.chdir(tmp_path)
    program, reason = PROGRAMS[name]
    path = tmp_path / "hostile.pth"
    if form == "zip":
        forge.torch_zip(path, program, {"data/0": FOUR})
    else:
        path.write_bytes(forge.legacy(program) if form == "legacy" else program)
    with pytest.raises(Unreadable) as caught:
        open_source(path)
    assert "hostile.pth" in str(caught.value) and "\n" not in str(caught.value)
    if form == "zip":
        assert reason in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["hostile.pth"]


def test_reason_names_the_key_that_asks(tmp_path):
    call = b"cos\nsystem\n(" + forge.text("ls") + b"tR"
    program = forge.dictionary(good=forge.tensor(), bad=call)
    forge.torch_zip(tmp_path / "x.pth", program, {"data/0": FOUR})
    with pytest.raises(Unreadable, match="key 'bad': .*os.system"):
        open_source(tmp_path / "x.pth")


ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
FILES = {
    "empty.pth": (b"", "empty"),
    "noise.pth": (bytes(range(200, 256)), "neither"),
    "tar.pth": (b"ustar" * 20, "neither"),
    "short.safetensors": (b"\x01", "cut short"),
    "huge.safetensors": ((1 << 62).to_bytes(8, "little") + b"{}", "4611686018427387904"),
    "cut.safetensors": (forge.header({"w": ENTRY}, FOUR[:8]), "key 'w'"),
    "json.safetensors": (forge.header({"w": ENTRY}, FOUR).replace(b"{", b"[", 1), "JSON"),
    "list.safetensors": (forge.header([]), "table"),
    "twice.safetensors": (
        (34).to_bytes(8, "little") + b'{"__metadata__":{},"__metadata__":{}}'[:34], "JSON"),
    "dtype.safetensors": (forge.header({"w": ENTRY | {"dtype": "F3"}}, FOUR), "key 'w'"),
    "shape.safetensors": (forge.header({"w": ENTRY | {"shape": [5]}}, FOUR), "key 'w'"),
    "negative.safetensors": (forge.header({"w": ENTRY | {"shape": [-4]}}, FOUR), "key 'w'"),
    "overlap.safetensors": (forge.header({"w": ENTRY, "v": ENTRY}, FOUR), "overlap"),
    "rest.safetensors": (forge.header({"w": ENTRY}, FOUR + b"more"), "belong to no tensor"),
    "deep.safetensors": ((20000).to_bytes(8, "little") + b"[" * 20000, "JSON"),
    "weights.npz": (b"PK", "ending"),
    "bad.index.json": (b'{"weight_map": {"w": "../secret.safetensors"}}', "outside the folder"),
    "missing.index.json": (b'{"weight_map": {"w": "part.safetensors"}}', "missing"),
    "empty.index.json": (b'{"weight_map": {}}', "weight_map"),
    "none.index.json": (b"[]", "no index"),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_refused(tmp_path, name):
    content, reason = FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Unreadable) as caught:
        open_source(tmp_path / name)
    assert name in str(caught.value) and reason in str(caught.value)


def test_damaged_archives_are_refused(tmp_path):
    program = forge.dictionary(w=forge.tensor())
    compressed = forge.torch_zip(tmp_path / "c.pth", program, {"data/0": FOUR},
                                 zipfile.ZIP_DEFLATED)
    big_endian = forge.torch_zip(tmp_path / "b.pth", program, {"data/0": FOUR, "byteorder": b"big"})
    other = forge.shuffled_zip(tmp_path / "o.pth")
    for path, reason in ((compressed, "compressed"), (big_endian, "big-endian"),
                         (other, "torch did not write it")):
        with pytest.raises(Unreadable, match=reason):
            open_source(path)


def test_index_that_disagrees_with_its_parts(tmp_path):
    forge.save(tmp_path / "one.safetensors", {"a": np.zeros(2, np.float32)})
    index = tmp_path / "m.index.json"
    index.write_text('{"weight_map": {"b": "one.safetensors"}}')
    with pytest.raises(Unreadable, match="key 'b'"):
        open_source(index)


def test_nothing_there_and_folders_without_weights(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        open_source(tmp_path / "absent.pth")
    with pytest.raises(UserError, match="not exactly one"):
        open_source(tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_random_damage_never_escapes(tmp_path, seed):
    """Whatever byte is changed, a file opens or is refused with a sentence."""
    rng = np.random.default_rng(seed)
    keys = b"\x80\x02](" + forge.text("0") + b"e."
    stream = forge.legacy(forge.dictionary(w=forge.tensor()), keys, struct.pack("<q", 4) + FOUR)
    good = forge.save(tmp_path / "good.pth", arrays()).read_bytes()
    for content in (stream, good):
        for _ in range(100):
            damaged = bytearray(content)
            damaged[rng.integers(len(damaged))] = rng.integers(256)
            path = tmp_path / "damaged.pth"
            path.write_bytes(damaged)
            try:
                read(open_source(path))
            except Unreadable as error:
                assert re.match(r"cannot read .*damaged\.pth", str(error))
