"""The index beside each shard: what planning needs to know of every record, without its picture.

`shard-00000.index.npz` holds one row a record, in the order of the shard, so that a record's
position is its row: key, source, width, height, bytes of the record, its checksum, the length of
its longest caption and the number of its aspect ratio. Beside them lie the captions, which planning
leaves unread.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pid_jax.data.buckets import FOLDER_RATIOS, folder_ratio
from pid_jax.data.records import Record, checksum_of
from pid_jax.errors import UserError
from pid_jax.files import atomic_write

_NUMBERS = {"width": np.int32, "height": np.int32, "size": np.int64, "checksum": np.uint32,
            "caption_length": np.int32}
_TEXTS = ("key", "source")


@dataclasses.dataclass(frozen=True)
class Texts:
    """Many strings in two arrays: their UTF-8 bytes one after another, and where each ends."""

    blob: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Texts":
        parts = [t.encode() for t in texts]
        return cls(np.frombuffer(b"".join(parts), np.uint8),
                   np.cumsum([len(p) for p in parts], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def is_whole(self) -> bool:
        """Whether the ends cut the blob into strings of UTF-8."""
        if self.ends.ndim != 1 or self.blob.ndim != 1 or self.blob.dtype != np.uint8:
            return False
        cuts = np.concatenate([[0], self.ends])
        if np.any(np.diff(cuts) < 0) or cuts[-1] != len(self.blob):
            return False
        try:
            self.blob.tobytes().decode()
        except UnicodeDecodeError:
            return False
        inside = self.blob[cuts[cuts < len(self.blob)].astype(np.int64)] & 0xC0 == 0x80
        return not np.any(inside)  # no cut in the middle of a character

    def __getitem__(self, i: int) -> str:
        start = self.ends[i - 1] if i else 0
        return self.blob[start:self.ends[i]].tobytes().decode()


@dataclasses.dataclass(frozen=True)
class Index:
    """Columns of N records, each `[N]`.

    Attributes:
      key, source: strings, decoded on access.
      width, height: int32, pixels as seen upright.
      size: int64, bytes of the whole record.
      checksum: uint32, CRC-32 of the record.
      caption_length: int32, characters of the longest caption; 0 for none.
    """

    key: Texts
    source: Texts
    width: np.ndarray
    height: np.ndarray
    size: np.ndarray
    checksum: np.ndarray
    caption_length: np.ndarray

    def __len__(self) -> int:
        return len(self.key)

    def update_digest(self, sha: "hashlib._Hash") -> None:
        """Adds keys, sizes and checksums in order: what training on this data depends on.

        The digest of several indices is that of their concatenation.
        """
        numbers = np.stack([self.width, self.height, self.checksum], 1).astype("<i8")
        for i, row in enumerate(numbers):
            sha.update(self.key[i].encode() + b"\0" + row.tobytes())

    @property
    def bucket(self) -> np.ndarray:
        """uint8 [N], number of the nearest aspect ratio in `buckets.FOLDER_RATIOS`.

        The buckets of a training run depend on its layout: see `plan.Plan`.
        """
        sizes, inverse = np.unique(np.stack([self.width, self.height], 1), axis=0,
                                   return_inverse=True)
        numbers = [FOLDER_RATIOS.index(folder_ratio((int(w), int(h)))) for w, h in sizes]
        return np.array(numbers, np.uint8)[inverse.reshape(-1)]

    def bucket_counts(self) -> dict[str, int]:
        """Records of each aspect ratio that occurs."""
        numbers, counts = np.unique(self.bucket, return_counts=True)
        return {FOLDER_RATIOS[n]: int(count) for n, count in zip(numbers, counts)}


class IndexBuilder:
    """Collects rows, then becomes an `Index`."""

    def __init__(self):
        self._rows: list[tuple] = []
        self._captions: list[str] = []

    def add(self, record: Record, data: bytes) -> None:
        """A row for `record`, whose serialised bytes are `data`."""
        longest = max(map(len, record.captions.values()), default=0)
        self._captions.append(json.dumps(dict(record.captions), ensure_ascii=False))
        self._rows.append((record.key, record.source, record.width, record.height, len(data),
                           checksum_of(data), longest))

    def __len__(self) -> int:
        return len(self._rows)

    def build(self) -> Index:
        columns = list(zip(*self._rows)) or [()] * 7
        numbers = [np.array(c, t) for c, t in zip(columns[2:], _NUMBERS.values())]
        return Index(Texts.of(columns[0]), Texts.of(columns[1]), *numbers)

    def captions(self) -> Texts:
        """The captions of every row, each as a JSON object."""
        return Texts.of(self._captions)


def save_index(index: Index, captions: Texts, path: Path) -> None:
    """Writes an index, and the captions of its rows, as npz without pickled objects."""
    arrays = {name: getattr(index, name) for name in (*_NUMBERS, "bucket")}
    for name in _TEXTS:
        texts = getattr(index, name)
        arrays |= {name: texts.blob, f"{name}_ends": texts.ends}
    arrays |= {"captions": captions.blob, "captions_ends": captions.ends}
    with atomic_write(path, "wb") as file:
        np.savez_compressed(file, **arrays)


def load_index(path: Path | BinaryIO) -> Index:
    """Reads an index, a file or its path.

    Raises UserError when the file is missing, damaged or of another form.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            texts = [Texts(file[name], file[f"{name}_ends"]) for name in _TEXTS]
            index = Index(*texts, *(file[name] for name in _NUMBERS))
    except FileNotFoundError as error:
        raise UserError(f"the index {path} is missing; pack the data set again") from error
    except Exception as error:  # zipfile and numpy raise whatever a damaged file provokes.
        raise UserError(f"the index {path} is damaged: {error}; pack the data set again") from error
    if fault := _fault(index):
        raise UserError(f"the index {path} is damaged: {fault}; pack the data set again")
    return index


def load_captions(path: Path) -> list[dict[str, str]] | None:
    """The captions of every row, by name; None where an earlier version wrote the index.

    Raises: UserError when the file is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            if "captions" not in file:
                return None
            texts = Texts(file["captions"], file["captions_ends"])
        return [json.loads(texts[i]) for i in range(len(texts))]
    except Exception as error:  # as in `load_index`
        raise UserError(f"the index {path} is damaged: {error}; pack the data set again") from error


def _fault(index: Index) -> str | None:
    """What no index can have; a damaged one would fail later, where nobody looks for it."""
    numbers = {name: getattr(index, name) for name in _NUMBERS}
    if any(column.ndim != 1 or column.dtype.kind not in "iu" for column in numbers.values()):
        return "its numbers are no columns of whole numbers"
    for name in _TEXTS:
        if not getattr(index, name).is_whole():
            return f"its column {name} is no text"
    if len({*map(len, numbers.values()), len(index.key), len(index.source)}) > 1:
        return "its columns have different lengths"
    if np.any((index.width < 1) | (index.height < 1)):
        return "it lists pictures without pixels"
    return None


def concatenate(parts: Sequence[Index]) -> Index:
    """One index over the records of all parts, in order."""
    texts = [_concatenate_texts([getattr(p, name) for p in parts]) for name in _TEXTS]
    numbers = [np.concatenate([getattr(p, name) for p in parts]).astype(dtype)
               for name, dtype in _NUMBERS.items()]
    return Index(*texts, *numbers)


def _concatenate_texts(parts: Sequence[Texts]) -> Texts:
    starts = np.cumsum([0] + [len(p.blob) for p in parts[:-1]])
    return Texts(np.concatenate([p.blob for p in parts]),
                 np.concatenate([p.ends + s for p, s in zip(parts, starts)]))
