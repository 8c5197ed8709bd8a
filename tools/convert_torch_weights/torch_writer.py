"""Writes a state dict as torch's zip form, without torch: `torch.load` opens it with
`weights_only=True`.

`data.pkl` describes the tensors in the few pickle instructions that this needs; `data/N` holds the
raw numbers of tensor N.
"""

import math
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import IO

import numpy as np

from tools.convert_torch_weights.readers import LazyTensor
from tools.convert_torch_weights.readers.tensors import TORCH_STORAGES, contiguous_strides

_ALIGNMENT = 64
_ROOT = "archive"
_PROTOCOL = b"\x80\x02"
_MARK, _TUPLE, _REDUCE, _STOP = b"(", b"t", b"R", b"."
_EMPTY_TUPLE, _SET_ITEMS, _PERSISTENT, _FALSE = b")", b"u", b"Q", b"\x89"
_STORAGE_NAMES = {dtype: name for name, dtype in reversed(TORCH_STORAGES.items())}


Tree = Mapping[str, "Tree | LazyTensor | int | float"]


def write_torch_zip(file: IO[bytes], tensors: Iterable[LazyTensor]) -> None:
    """Writes tensors to an open binary file in the order given; each is read in its turn."""
    write_torch_tree(file, {tensor.name: tensor for tensor in tensors})


def write_torch_tree(file: IO[bytes], tree: Tree) -> None:
    """Writes nested dicts of tensors and numbers."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        numbers: dict[int, int] = {}
        for number, tensor in enumerate(_tensors(tree)):
            _add(archive, file, f"data/{number}", tensor.read())
            numbers[id(tensor)] = number
        _add(archive, file, "data.pkl", _PROTOCOL + _described(tree, numbers) + _STOP)
        _add(archive, file, "byteorder", b"little")
        _add(archive, file, "version", b"3\n")


def _add(archive: zipfile.ZipFile, file: IO[bytes], name: str, content: np.ndarray | bytes) -> None:
    """Adds a member whose bytes start at a multiple of 64, as torch places them."""
    member = zipfile.ZipInfo(f"{_ROOT}/{name}", date_time=(1980, 1, 1, 0, 0, 0))
    data = content if isinstance(content, bytes) else content.reshape(-1).view(np.uint8).data
    member.file_size = len(data)
    start = file.tell() + 30 + len(member.filename) + 4
    padding = -start % _ALIGNMENT
    member.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    with archive.open(member, "w", force_zip64=False) as entry:
        entry.write(data)


def _tensors(tree: Tree) -> Iterator[LazyTensor]:
    """The tensors of a tree in its order."""
    for value in tree.values():
        if isinstance(value, Mapping):
            yield from _tensors(value)
        elif isinstance(value, LazyTensor):
            yield value


def _described(value: Tree | LazyTensor | int | float, numbers: Mapping[int, int]) -> bytes:
    if isinstance(value, LazyTensor):
        return _rebuilt(numbers[id(value)], value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, int):
        return _int(value)
    items = b"".join(_text(name) + _described(entry, numbers) for name, entry in value.items())
    return _ordered_dict() + _MARK + items + _SET_ITEMS


def _rebuilt(number: int, tensor: LazyTensor) -> bytes:
    """The call `_rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())`."""
    storage = (_MARK + _text("storage") + _name("torch", _STORAGE_NAMES[tensor.dtype])
               + _text(str(number)) + _text("cpu") + _int(math.prod(tensor.shape)) + _TUPLE
               + _PERSISTENT)
    return (_name("torch._utils", "_rebuild_tensor_v2") + _MARK + storage + _int(0)
            + _ints(tensor.shape) + _ints(contiguous_strides(tensor.shape)) + _FALSE
            + _ordered_dict() + _TUPLE + _REDUCE)


def _ordered_dict() -> bytes:
    return _name("collections", "OrderedDict") + _EMPTY_TUPLE + _REDUCE


def _name(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _int(value: int) -> bytes:
    """BININT where it fits, else LONG1."""
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(data)]) + data


def _ints(values: tuple[int, ...]) -> bytes:
    return _MARK + b"".join(map(_int, values)) + _TUPLE
