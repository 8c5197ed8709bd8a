"""Hand-made weight files, hostile ones included, for the tests of the readers."""

import io
import json
import struct
import zipfile
from pathlib import Path

import numpy as np

from tools.convert_torch_weights.readers.tensors import LazyTensor
from tools.convert_torch_weights.safetensors_writer import write_safetensors
from tools.convert_torch_weights.torch_writer import write_torch_zip

MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
MACHINE = b"\x80\x02}(X\x0d\x00\x00\x00little_endian\x88u."


def lazy(name: str, array: np.ndarray) -> LazyTensor:
    return LazyTensor(name, array.dtype, array.shape, lambda: array)


def save(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    """Writes `.pth` or `.safetensors` with this project's writers."""
    tensors = [lazy(name, array) for name, array in arrays.items()]
    with open(path, "wb") as file:
        if path.suffix == ".safetensors":
            write_safetensors(file, tensors, {"format": "pt"})
        else:
            write_torch_zip(file, tensors)
    return path


def torch_zip(path: Path, program: bytes, members: dict[str, bytes] | None = None,
              compression: int = zipfile.ZIP_STORED) -> Path:
    """A torch zip with any pickle program as its data.pkl."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", program)
        for name, content in (members or {}).items():
            archive.writestr(f"archive/{name}", content)
    return path


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def storage(key: str = "0", count: int = 4, kind: str = "FloatStorage") -> bytes:
    """Pickle of a torch storage reference."""
    return (b"(" + text("storage") + b"ctorch\n" + kind.encode() + b"\n" + text(key) + text("cpu")
            + b"J" + struct.pack("<i", count) + b"tQ")


def tensor(shape: bytes = b"K\x04\x85", strides: bytes = b"K\x01\x85", first: int = 0,
           **of_storage) -> bytes:
    """Pickle of a tensor; shape and strides are pickled tuples."""
    return (b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage(**of_storage)
            + b"J" + struct.pack("<i", first) + shape + strides
            + b"\x89ccollections\nOrderedDict\n)RtR")


def dictionary(**items: bytes) -> bytes:
    """A whole pickle program of a dict of pickled values."""
    return b"\x80\x02}(" + b"".join(text(k) + v for k, v in items.items()) + b"u."


def legacy(value: bytes, keys: bytes = b"\x80\x02].", data: bytes = b"") -> bytes:
    """A torch legacy stream."""
    return MAGIC + b"\x80\x02M\xe9\x03." + MACHINE + value + keys + data


def header(table: dict, data: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    encoded = json.dumps(table).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def shuffled_zip(path: Path) -> Path:
    """A zip that torch did not write."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("readme.txt", "no weights")
    path.write_bytes(buffer.getvalue())
    return path
