"""A weight file in several parts with an `*.index.json` that says which tensor lies where."""

import json
from pathlib import Path

from tools.convert_torch_weights.readers.safetensors_file import (
    MAX_HEADER, no_doubles, open_safetensors)
from tools.convert_torch_weights.readers.tensors import Source, Unreadable, is_plain_name, shown
from tools.convert_torch_weights.readers.torch_file import open_torch_file


def open_sharded(index: Path) -> Source:
    """Opens the parts that an index names (`.safetensors` or torch files beside it).

    Raises:
      Unreadable: damaged index, a missing part, a name that leaves the folder, or a tensor that
        is not in the part the index gives.
    """
    places = _weight_map(index)
    parts = {name: _open_part(index, name) for name in dict.fromkeys(places.values())}
    for tensor, part in places.items():
        if tensor not in parts[part].tensors:
            raise Unreadable(index, f"the part {part} does not hold it", tensor)
    tensors = {tensor: parts[part].tensors[tensor] for tensor, part in places.items()}
    if extra := [f"'{shown(name)}' of {part}" for part, source in parts.items()
                 for name in source.tensors if places.get(name) != part]:
        raise Unreadable(index, f"it does not list {', '.join(extra)}")
    files = (index, *(source.path for source in parts.values()))
    return Source(index, f"{len(parts)} parts with an index", tensors, {}, files)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        if index.stat().st_size > MAX_HEADER:
            raise ValueError("too long")
        text = index.read_text(encoding="utf-8")
        places = json.loads(text, object_pairs_hook=no_doubles)["weight_map"]
        if places and all(type(place) is str for place in places.values()):
            return places
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(index, "it is no index of weight parts") from error
    raise Unreadable(index, "it is no index of weight parts (weight_map is empty or malformed)")


def _open_part(index: Path, name: str) -> Source:
    if not is_plain_name(name):
        raise Unreadable(index, f"it names the part '{shown(name)}', which is outside the folder")
    path = index.parent / name
    if not path.is_file():
        raise Unreadable(index, f"the part {name} is missing")
    return open_safetensors(path) if path.suffix == ".safetensors" else open_torch_file(path)
