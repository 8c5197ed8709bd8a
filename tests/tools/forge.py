"""Hand-made weight files, hostile ones included, for the tests of the readers."""

import io
import json
import struct
import zipfile
from pathlib import Path
from typing import IO

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


def torch_zip(path: Path | IO[bytes], program: bytes, members: dict[str, bytes] | None = None,
              compression: int = zipfile.ZIP_STORED) -> Path | IO[bytes]:
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


def recorded(name: str, **fields: bytes) -> bytes:
    """Pickle of an object of a class, with attributes."""
    module, _, kind = name.rpartition(".")
    items = b"".join(text(key) + value for key, value in fields.items())
    return b"c" + module.encode() + b"\n" + kind.encode() + b"\n)\x81}(" + items + b"ub"


def size(*numbers: int) -> bytes:
    """Pickle of a torch.Size."""
    inner = b"".join(b"J" + struct.pack("<i", n) for n in numbers)
    return b"ctorch\nSize\n((" + inner + b"ttR"


def distributed(folder: Path, chunks: list[tuple[int, np.ndarray]], rows: int) -> Path:
    """A distributed checkpoint of one float32 matrix `net.w`, cut into blocks of rows."""
    kinds = "torch.distributed.checkpoint.metadata."
    folder.mkdir(parents=True)
    listed, stored = b"", b""
    for number, (first, block) in enumerate(chunks):
        payload = io.BytesIO()
        program = b"\x80\x02" + tensor(
            b"".join(b"J" + struct.pack("<i", n) for n in block.shape) + b"\x86",
            b"J" + struct.pack("<i", block.shape[1]) + b"K\x01\x86", count=block.size) + b"."
        torch_zip(payload, program, {"data/0": block.tobytes()})
        (folder / f"__{number}_0.distcp").write_bytes(payload.getvalue())
        corner = size(first, 0)
        listed += recorded(f"{kinds}ChunkStorageMetadata", offsets=corner,
                           sizes=size(*block.shape))
        stored += recorded(f"{kinds}MetadataIndex", fqn=text("net.w"), offset=corner, index=b"N")
        stored += recorded(
            "torch.distributed.checkpoint.filesystem._StorageInfo",
            relative_path=text(f"__{number}_0.distcp"), offset=b"K\x00",
            length=b"J" + struct.pack("<i", len(payload.getvalue())))
    properties = recorded(f"{kinds}TensorProperties", dtype=b"ctorch\nfloat32\n")
    described = recorded(f"{kinds}TensorStorageMetadata", properties=properties,
                         size=size(rows, chunks[0][1].shape[1]), chunks=b"](" + listed + b"e")
    index = recorded(f"{kinds}Metadata", storage_data=b"}(" + stored + b"u",
                     state_dict_metadata=b"}(" + text("net.w") + described + b"u")
    (folder / ".metadata").write_bytes(b"\x80\x02" + index + b".")
    return folder


def shuffled_zip(path: Path) -> Path:
    """A zip that torch did not write."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("readme.txt", "no weights")
    path.write_bytes(buffer.getvalue())
    return path
