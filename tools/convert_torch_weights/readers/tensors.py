"""What every reader yields: tensors known by name, dtype and shape, their numbers still on disk."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from pid_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """One tensor, mapped from disk or made by `read()`; drop the result to give the memory back.

    `read` returns an array of `shape` and `dtype` (bfloat16 and float8 through ml_dtypes), often a
    read-only view of the file and not always contiguous.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened file or folder.

    Attributes:
      path: what was opened.
      format: the kind of container, in words.
      tensors: full name (nested keys joined by dots) -> tensor, in the file's order.
      other: full name -> short description of what is stored beside the tensors.
      files: every file that holds a part of it, for the checksum.
    """

    path: Path
    format: str
    tensors: Mapping[str, LazyTensor]
    other: Mapping[str, str]
    files: tuple[Path, ...]


MAX_SHOWN = 200


def shown(text: str) -> str:
    """Text out of a file as it may stand in a message: on one line, printable and not too long."""
    cut = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    return cut if cut.isprintable() else ascii(cut)[1:-1]


def is_plain_name(name: object) -> bool:
    """Whether a name that a file gives is that of a file beside it."""
    return (isinstance(name, str) and Path(name).name == name and name not in ("", "..")
            and name.isprintable() and len(name.encode()) <= 255)


class Unreadable(UserError):
    """A weight file that is refused: a sentence with the file, the key (if any) and the reason."""

    def __init__(self, path: Path, reason: str, key: str | None = None):
        where = f"{path}, key '{shown(key)}'" if key else f"{path}"
        super().__init__(f"cannot read {where}: {reason}")


MAX_AXES = 16

# Names as torch and safetensors write them -> numpy.
_COMMON = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2, "int64": np.int64, "int32": np.int32, "int16": np.int16,
    "int8": np.int8, "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32,
    "uint64": np.uint64, "bool": np.bool_, "complex64": np.complex64,
}
TORCH_DTYPES = {name: np.dtype(kind) for name, kind in _COMMON.items()}
TORCH_STORAGES = {name: TORCH_DTYPES[kind] for name, kind in {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "UntypedStorage": "uint8", "ComplexFloatStorage": "complex64",
}.items()}
SAFETENSORS_DTYPES = {name: TORCH_DTYPES[kind] for name, kind in {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32",
    "U64": "uint64", "BOOL": "bool", "C64": "complex64",
}.items()}


@dataclasses.dataclass(frozen=True)
class Region:
    """A run of `nbytes` raw little-endian bytes at `offset` in `file`."""

    file: Path
    offset: int
    nbytes: int

    def view(self, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None = None,
             first: int = 0) -> np.ndarray:
        """Maps a tensor read-only; `strides` and `first` count elements, as torch counts them."""
        if math.prod(shape) == 0:
            return np.empty(shape, dtype)
        flat = np.memmap(self.file, np.uint8, "r", self.offset, (self.nbytes,))
        flat = flat[:self.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)[first:]
        if strides is None or strides == contiguous_strides(shape):
            return flat[:math.prod(shape)].reshape(shape)
        in_bytes = tuple(step * dtype.itemsize for step in strides)
        return np.lib.stride_tricks.as_strided(flat, shape, in_bytes, writeable=False)

    def holds(self, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...],
              first: int) -> bool:
        """Whether every element of such a tensor lies inside the region."""
        if min((first, *shape, *strides)) < 0 or not len(shape) == len(strides) <= MAX_AXES:
            return False
        if math.prod(shape) == 0:
            return True
        last = first + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        return (last + 1) * dtype.itemsize <= self.nbytes


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    return tuple(math.prod(shape[axis + 1:]) for axis in range(len(shape)))
