"""The names that torch's weight files use, given their meaning as plain data.

Every other name is refused: a weight file has no need of it. Nothing is imported for them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from tools.convert_torch_weights.readers import pickle_subset
from tools.convert_torch_weights.readers.pickle_subset import Call, Name, Persistent
from tools.convert_torch_weights.readers.tensors import (
    TORCH_DTYPES, TORCH_STORAGES, LazyTensor, Region, Unreadable, shown)

MAX_DEPTH = 64
MAX_ENTRIES = 500_000


@dataclasses.dataclass(frozen=True, eq=False)
class StorageRef:
    """A torch storage: `dtype`, `key` of its bytes, `count` elements, from element `first` on."""

    dtype: np.dtype
    key: str
    count: int
    first: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class TensorRef:
    """A tensor as the file describes it; strides and `first` count elements of `dtype`."""

    storage: StorageRef
    dtype: np.dtype
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _storage(reference: Persistent) -> StorageRef:
    kind, storage_type, key, _, count, *view = reference.identity
    dtype = _known(TORCH_STORAGES, storage_type)
    first = view[0][1] if view and view[0] else 0
    if kind != "storage" or not isinstance(key, str):
        raise TypeError("not a storage")
    return StorageRef(dtype, key, *_ints((count, first)))


def _tensor(storage, first, shape, strides, *rest) -> TensorRef:
    stored = _storage(storage)
    return TensorRef(stored, stored.dtype, sum(_ints((first, stored.first))), _ints(shape),
                     _ints(strides))


def _typed_tensor(storage, first, shape, strides, gradient, hooks, dtype, *rest) -> TensorRef:
    stored = _storage(storage)
    kind = _known(TORCH_DTYPES, dtype)
    return TensorRef(stored, kind, *_ints((first,)), _ints(shape), _ints(strides))


def _known(table: dict[str, np.dtype], name: Name) -> np.dtype:
    kind = name.text.rpartition(".")[2]
    if kind not in table:
        raise pickle_subset.BadPickle(f"it holds tensors of the kind {name.text}, which is not "
                                      "supported")
    return table[kind]


def _ints(values) -> tuple[int, ...]:
    if not all(type(value) is int and abs(value) < 1 << 63 for value in values):
        raise TypeError("sizes must be 64-bit integers")
    return tuple(values)


def _parameter(data, *rest):
    return data


def _typed(function, kind, arguments, state):
    return construct(Call(function, tuple(arguments)))


def _text(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise ValueError("only latin1")
    return text.encode("latin1")


def _dict(items=(), *rest) -> dict:
    pairs = items.items() if isinstance(items, dict) else items
    return {pickle_subset.key_of(key): value for key, value in pairs}


def _empty(*rest) -> dict:
    return {}


def _list(items=()) -> list:
    return list(items)


def _size(items=()) -> tuple:
    return tuple(items)


def _path(*parts: str) -> str:
    return str(Path(*parts))


def _first(value, *rest):
    return value


# name in the file -> our own function that makes plain data of the call's arguments
MEANINGS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _typed,
    "torch.Size": _size,
    "torch.device": _first,
    "torch.serialization._get_layout": _first,
    "collections.OrderedDict": _dict,
    "collections.defaultdict": _empty,
    "collections.Counter": _dict,
    "builtins.set": _list,
    "__builtin__.set": _list,
    "_codecs.encode": _text,
    "pathlib.PosixPath": _path,
    "pathlib.PurePosixPath": _path,
    "pathlib._local.PosixPath": _path,
}
# Recorded without meaning: descriptions in the index of a distributed checkpoint, numpy's random
# state and scalars beside the weights, types that only serve as arguments of the names above.
_DESCRIPTIONS = "torch.distributed.checkpoint"
INERT = frozenset({
    f"{_DESCRIPTIONS}.metadata.{kind}" for kind in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")
} | {
    f"{_DESCRIPTIONS}.filesystem._StorageInfo", f"{_DESCRIPTIONS}._fsspec_filesystem._StorageInfo",
    "torch.nn.parameter.Parameter", "torch.Tensor", "torch.strided", "torch.memory_format",
    "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.ndarray",
    "numpy.dtype", "builtins.dict", "builtins.list", "__builtin__.dict", "__builtin__.list",
} | {f"torch.{name}" for name in TORCH_DTYPES} | {
    f"torch.{device}{name}" for name in TORCH_STORAGES for device in ("", "cuda.", "storage.")})


def construct(call: Call) -> Any:
    """Plain data for a call with a known meaning; the record itself for any other."""
    meaning = MEANINGS.get(call.function.text) if isinstance(call.function, Name) else None
    return meaning(*call.arguments) if meaning else call


def read_program(path: Path, file: IO[bytes]) -> Any:
    """The value of the pickle at the file's position, checked to mention known names only.

    Raises:
      Unreadable: damaged, or it mentions a name that is neither in MEANINGS nor in INERT.
    """
    try:
        program = pickle_subset.run(file, construct)
    except pickle_subset.BadPickle as error:
        raise Unreadable(path, str(error)) from error
    for name in program.names:
        if name.text not in MEANINGS and name.text not in INERT:
            raise Unreadable(
                path, f"it asks (at pickle byte {name.position}) to run {shown(name.text)}, which "
                "is no part of a weight file; nothing was run; get the weights as .safetensors "
                "from a source you trust", _place_of(path, name, program.value))
    return program.value


def _place_of(path: Path, name: Name, value: Any) -> str | None:
    """The key whose value is the call of `name`; None where that is hidden."""
    with contextlib.suppress(Unreadable):
        for key, item in contents(path, value):
            if isinstance(item, Call) and item.function is name:
                return key or None
    return None


def contents(path: Path, value: Any) -> Iterator[tuple[str, Any]]:
    """Everything in nested dicts, lists and tuples as (keys joined by dots, item), in order.

    Raises:
      Unreadable: deeper than MAX_DEPTH (a dict may contain itself) or more than MAX_ENTRIES items.
    """
    open_containers = [iter([("", value)])]
    for _ in range(MAX_ENTRIES):
        while (entry := next(open_containers[-1], None)) is None:
            open_containers.pop()
            if not open_containers:
                return
        name, item = entry
        if not (isinstance(item, dict | list | tuple) and item):
            yield name, item
        elif len(open_containers) > MAX_DEPTH:
            break
        else:
            open_containers.append(_children(name, item))
    raise Unreadable(path, "its contents are nested without end")


def _children(name: str, container: dict | list | tuple) -> Iterator[tuple[str, Any]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return ((f"{name}.{_key_text(key)}" if name else _key_text(key), item) for key, item in items)


def _key_text(key: Any) -> str:
    """A dict's key as a part of a name."""
    return key if isinstance(key, str) else describe(key)


def lazy_tensors(path: Path, value: Any, locate: Callable[[StorageRef], Region]
                 ) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Splits the value of a weight file into tensors and a description of everything else.

    Args:
      path: the file, for messages.
      value: what `read_program` returned.
      locate: where a storage's bytes lie; raises KeyError when the file has none.
    Raises:
      Unreadable: a tensor without bytes, or one that reaches beyond them; endless nesting.
    """
    tensors, other = {}, {}
    for name, item in contents(path, value):
        if name in tensors or name in other:
            raise Unreadable(path, "two of its entries have this name", name)
        if isinstance(item, TensorRef):
            tensors[name] = _lazy(path, name, item, locate)
        else:
            other[name] = describe(item)
    return tensors, other


def _lazy(path: Path, name: str, ref: TensorRef, locate) -> LazyTensor:
    try:
        region = locate(ref.storage)
    except KeyError as error:
        raise Unreadable(path, f"the file holds no data for storage {ref.storage.key!r}",
                         name) from error
    if not region.holds(ref.dtype, ref.shape, ref.strides, ref.first):
        raise Unreadable(path, f"shape {list(ref.shape)} of {ref.dtype} reaches beyond the "
                         f"{region.nbytes} bytes stored for it", name)
    return LazyTensor(name, ref.dtype, ref.shape,
                      lambda: region.view(ref.dtype, ref.shape, ref.strides, ref.first))


def describe(item: Any) -> str:
    """A short text for something that is not a tensor."""
    if isinstance(item, Call):
        return f"object {getattr(item.function, 'text', '?')}"
    if isinstance(item, Name):
        return item.text
    if isinstance(item, int) and item.bit_length() > 64:
        return f"a number of {item.bit_length()} bits"
    if isinstance(item, str | bytes | int | float | None):
        return repr(item[:60] if isinstance(item, str | bytes) else item)
    return f"object {type(item).__name__}"
