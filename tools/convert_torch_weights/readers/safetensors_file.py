"""`.safetensors`: eight bytes of length, a JSON header, raw tensors without gaps."""

import json
import math
from pathlib import Path

from tools.convert_torch_weights.readers.tensors import (
    MAX_AXES, SAFETENSORS_DTYPES, LazyTensor, Region, Source, Unreadable)

MAX_HEADER = 100_000_000


def open_safetensors(path: Path) -> Source:
    """Opens one file; the header is checked in full before any tensor is read.

    Raises:
      Unreadable: cut short, forged or inconsistent header.
    """
    size = path.stat().st_size
    header, start = _read_header(path, size)
    metadata = header.pop("__metadata__", {})
    tensors = {name: _tensor(path, name, entry, start, size) for name, entry in header.items()}
    _check_no_gaps(path, header, size - start)
    other = {f"__metadata__.{key}": str(value) for key, value in metadata.items()}
    return Source(path, "safetensors", tensors, other, (path,))


def _read_header(path: Path, size: int) -> tuple[dict, int]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            raise Unreadable(path, f"its header claims {length} bytes, the file has {size}; it is "
                             "no safetensors file or is cut short")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=no_doubles)
    except (ValueError, RecursionError) as error:
        raise Unreadable(path, "its header is no valid JSON") from error
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise Unreadable(path, "its header is no table of tensors")
    return header, 8 + length


def no_doubles(pairs: list) -> dict:
    """For `json.loads`: refuses a table with a key that occurs twice."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


def _tensor(path: Path, name: str, entry, start: int, size: int) -> LazyTensor:
    try:
        dtype, shape = SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"])
        first, last = entry["data_offsets"]
        sound = all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, first, last))
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(path, "its header entry is not understood", name) from error
    if not sound or len(shape) > MAX_AXES or last - first != math.prod(shape) * dtype.itemsize:
        raise Unreadable(path, f"shape {list(shape)} of {dtype} does not fill the bytes {first} to "
                         f"{last} that its header gives", name)
    if start + last > size:
        raise Unreadable(path, f"the file is cut short: it has {size} bytes and this tensor ends "
                         f"at byte {start + last}", name)
    region = Region(path, start + first, last - first)
    return LazyTensor(name, dtype, shape, lambda: region.view(dtype, shape))


def _check_no_gaps(path: Path, header: dict, nbytes: int) -> None:
    """Tensors must follow one another without overlap and fill the file."""
    at = 0
    for first, last in sorted(entry["data_offsets"] for entry in header.values()):
        if first != at:
            raise Unreadable(path, f"its tensors overlap or leave a gap at data byte {at}")
        at = last
    if at != nbytes:
        raise Unreadable(path, f"{nbytes - at} bytes at its end belong to no tensor")
