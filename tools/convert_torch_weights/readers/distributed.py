"""Torch distributed checkpoint folders: a `.metadata` index and `*.distcp` data files."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from tools.convert_torch_weights.readers.pickle_subset import Call
from tools.convert_torch_weights.readers.tensors import (
    TORCH_DTYPES, LazyTensor, Source, Unreadable, is_plain_name, shown)
from tools.convert_torch_weights.readers.torch_file import read_zip
from tools.convert_torch_weights.readers.torch_objects import read_program


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A box of one tensor, stored as a torch zip of `length` bytes at `start` of `file`."""

    file: Path
    start: int
    length: int
    corner: tuple[int, ...]
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        with open(self.file, "rb") as file:
            tensors, _ = read_zip(self.file, file, self.start, self.length)
        if list(tensors) != [""]:
            raise Unreadable(self.file, f"the bytes from {self.start} on hold not one tensor")
        return tensors[""].read()

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + n) for at, n in zip(self.corner, self.shape, strict=True))


def open_distributed(folder: Path) -> Source:
    """Opens the folder that holds `.metadata`.

    Raises:
      Unreadable: damaged index, a data file that is missing or cut short, an unknown form.
    """
    path = folder / ".metadata"
    with open(path, "rb") as file:
        index = _fields(path, read_program(path, file))
    try:
        places = _places(folder, index["storage_data"])
        described = {name: _fields(path, entry)
                     for name, entry in index["state_dict_metadata"].items()
                     if not _is_bytes(entry)}
        tensors = {name: _tensor(folder, name, entry, places) for name, entry in described.items()}
    except Unreadable:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise Unreadable(path, "its index has an unknown form") from error
    other = {name: "bytes" for name in index["state_dict_metadata"] if name not in tensors}
    files = (path, *sorted({place[0] for place in places.values()}))
    return Source(folder, "torch distributed checkpoint", tensors, other, files)


def _is_bytes(entry: Any) -> bool:
    """Whether an entry of the index is a pickled object beside the tensors; it is not opened."""
    return isinstance(entry, Call) and getattr(entry.function, "text", "").endswith(
        ".BytesStorageMetadata")


def _fields(path: Path, value: Any) -> dict:
    """The attributes of a recorded object."""
    if isinstance(value, Call) and isinstance(value.state, dict):
        return value.state
    raise Unreadable(path, "it is no index of a torch distributed checkpoint")


def _places(folder: Path, storage_data: dict) -> dict[tuple, tuple[Path, int, int]]:
    """(name, corner or None) -> (file, start, length)."""
    places = {}
    for key, info in storage_data.items():
        where, stored = _fields(folder, key), _fields(folder, info)
        name, start, length = (stored[k] for k in ("relative_path", "offset", "length"))
        if stored.get("transform_descriptors"):
            raise Unreadable(folder, "its data is compressed; save it again without", where["fqn"])
        if not is_plain_name(name):
            raise Unreadable(folder, f"it names the file '{shown(name)}', which is outside the "
                             "folder")
        places[where["fqn"], where.get("offset")] = (folder / name, start, length)
    return places


def _tensor(folder: Path, name: str, entry: dict, places: dict) -> LazyTensor:
    dtype = TORCH_DTYPES[_dtype_name(entry["properties"])]
    shape = tuple(entry["size"])
    chunks = []
    for chunk in entry["chunks"]:
        fields = _fields(folder, chunk)
        file, start, length = places[name, fields["offsets"]]
        _check_inside(folder, name, file, start, length)
        chunks.append(_Chunk(file, start, length, tuple(fields["offsets"]),
                             tuple(fields["sizes"])))
    _check_tiling(folder, name, shape, chunks)
    return LazyTensor(name, dtype, shape, lambda: _assemble(folder, name, dtype, shape, chunks))


def _dtype_name(properties: Call) -> str:
    """TensorProperties keeps its state as a tuple or a dict; the dtype comes first."""
    state = properties.state
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    return dtype.text.removeprefix("torch.")


def _check_inside(folder: Path, name: str, file: Path, start: int, length: int) -> None:
    if not file.is_file():
        raise Unreadable(folder, f"the data file {file.name} is missing", name)
    size = file.stat().st_size
    if not _are_sizes((start, length)) or start + length > size:
        raise Unreadable(folder, f"the data file {file.name} is cut short: it has {size} bytes and "
                         f"this tensor ends at byte {start + length}", name)


def _check_tiling(folder: Path, name: str, shape: tuple[int, ...], chunks: list[_Chunk]) -> None:
    sound = _are_sizes(shape) and all(_are_sizes(chunk.corner + chunk.shape) for chunk in chunks)
    inside = sound and all(at + n <= whole for chunk in chunks
                           for at, n, whole in zip(chunk.corner, chunk.shape, shape, strict=True))
    if not inside or sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        raise Unreadable(folder, f"its pieces do not make up shape {list(shape)}", name)


def _are_sizes(numbers: tuple) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


def _assemble(folder: Path, name: str, dtype: np.dtype, shape: tuple[int, ...],
              chunks: list[_Chunk]) -> np.ndarray:
    if len(chunks) == 1:
        return _checked(folder, name, dtype, chunks[0])
    whole, missing = np.empty(shape, dtype), np.ones(shape, np.bool_)
    for chunk in chunks:
        whole[chunk.box] = _checked(folder, name, dtype, chunk)
        missing[chunk.box] = False
    if missing.any():
        raise Unreadable(folder, "its pieces overlap and leave a part out", name)
    return whole


def _checked(folder: Path, name: str, dtype: np.dtype, chunk: _Chunk) -> np.ndarray:
    piece = chunk.read()
    if piece.shape != chunk.shape or piece.dtype != dtype:
        raise Unreadable(folder, f"its data is {piece.dtype} {list(piece.shape)}, the index says "
                         f"{dtype} {list(chunk.shape)}", name)
    return piece
