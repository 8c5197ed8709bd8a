"""From items of any collection to a packed data set, with a report of what was left out."""

import collections
import concurrent.futures
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pid_jax import images
from pid_jax.data.command import show
from pid_jax.data.dataset import DatasetWriter
from pid_jax.data.records import Record
from pid_jax.errors import UserError

SKIPPED = "skipped.jsonl"
LARGEST_FILE = 1 << 30
_PROGRESS_SECONDS = 10
_AHEAD = 4  # items that each worker may be ahead


@dataclasses.dataclass(frozen=True)
class Item:
    """A picture to pack.

    Attributes:
      key: unique name in the data set.
      name: what reports call it, such as the path in its collection.
      read: gives the picture file's bytes; raises OSError or UserError.
      captions: gives its named captions; raises UserError when they cannot be used.
    """

    key: str
    name: str
    read: Callable[[], bytes]
    captions: Callable[[], Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Skip:
    """Something in a collection that is not packed, and why."""

    name: str
    reason: str


@dataclasses.dataclass
class Summary:
    """What became of a collection.

    Attributes:
      packed: pictures in the data set.
      earlier: how many of them an earlier run had packed.
      bytes: of all records.
    """

    packed: int = 0
    earlier: int = 0
    bytes: int = 0
    skipped: list[Skip] = dataclasses.field(default_factory=list)

    def lines(self, folder: Path) -> Iterator[str]:
        """For people: totals, and the first few skips by name."""
        yield f"packed {self.packed} pictures ({self.bytes / 1e6:.1f} MB) into {folder}"
        if self.earlier:
            yield f"{self.earlier} of them were there already"
        if self.skipped:
            yield f"skipped {len(self.skipped)}, listed in {folder / SKIPPED}:"
            yield from (f"  {skip.name}: {skip.reason}" for skip in self.skipped[:5])
        if len(self.skipped) > 5:
            yield "  ..."


def pack(items: Iterable[Item | Skip], folder: Path, source: str, shard_bytes: int,
         min_side: int = 1, workers: int = 1, strict: bool = False,
         recipe: Mapping[str, Any] | None = None) -> Summary:
    """Packs items into `folder`, in their order, whatever the number of workers.

    Args:
      items: the collection; bad ones are skipped, named in `skipped.jsonl` and the summary.
      folder: empty, missing, or a data set of the same recipe: then only items whose keys are not
        in it are read.
      source: the collection's name, kept in every record.
      shard_bytes: see `DatasetWriter`.
      min_side: pictures with a shorter side below this are skipped.
      workers: threads that read and decode.
      strict: a bad item is an error.
      recipe: see `DatasetWriter`.
    Raises: UserError when every item was skipped, or the disk cannot be written.
    """
    summary = Summary()
    clock = time.monotonic()
    make = functools.partial(to_record, source=source, min_side=min_side)
    with (DatasetWriter(folder, shard_bytes, recipe) as writer,
          _Report(folder, summary, strict) as report):
        summary.earlier, known = len(writer), set(writer.keys())
        for item, outcome in _outcomes(items, make, known, workers):
            try:
                record = outcome()
                _check_new(record, writer)
            except UserError as error:
                report.skip(item.name, str(error))
                writer.skipped = len(summary.skipped)
                continue
            writer.add(record)
            if time.monotonic() - clock > _PROGRESS_SECONDS:
                clock = time.monotonic()
                show(f"... {len(writer)} packed, {len(summary.skipped)} skipped")
        summary.packed, summary.bytes = len(writer), writer.bytes_written
    if not summary.packed:
        raise UserError(_nothing(summary))
    return summary


def _outcomes(items: Iterable[Item | Skip], make: Callable[[Item | Skip], Record],
              known: set[str], workers: int
              ) -> Iterator[tuple[Item | Skip, Callable[[], Record]]]:
    """Items in their order, each with the function that gives its record or raises UserError.

    Items whose keys are in `known` are left out, and taken from it.
    """
    waiting: collections.deque = collections.deque()
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        for item in items:
            if isinstance(item, Item) and item.key in known:
                known.remove(item.key)
                continue
            waiting.append((item, pool.submit(make, item).result))
            if len(waiting) > _AHEAD * workers:
                yield waiting.popleft()
        yield from waiting
    except GeneratorExit:
        raise
    except BaseException:  # of the collection: what came before it is packed
        yield from waiting
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _check_new(record: Record, writer: DatasetWriter) -> None:
    if record.key in writer:
        raise UserError(f"duplicate key {record.key!r}: another picture has the same name")


def to_record(item: Item | Skip, source: str, min_side: int = 1) -> Record:
    """The record of an item. Raises UserError with the reason when it has to be skipped."""
    if isinstance(item, Skip):
        raise UserError(item.reason)
    captions = dict(item.captions())
    if not all(map(_is_unicode, (item.key, *captions, *captions.values()))):
        raise UserError("its name or caption is not valid UTF-8 text")
    data = _read(item)
    # Decoding is the only proof that a file is whole.
    width, height = images.decode(data).size
    check_side((width, height), min_side)
    return Record(item.key, source, width, height, captions, data)


def check_side(size: tuple[int, int], min_side: int) -> None:
    """Raises UserError for a picture whose shorter side is below `min_side`."""
    if min(size) < min_side:
        raise UserError(f"it is {size[0]} x {size[1]}, smaller than --min-side {min_side}")


def _read(item: Item) -> bytes:
    try:
        data = item.read()
    except OSError as error:
        raise UserError(f"it cannot be read: {error.strerror or error}") from error
    if len(data) > LARGEST_FILE:
        raise UserError(f"the file has {len(data)} bytes; at most {LARGEST_FILE} are packed")
    return data


def _is_unicode(text: str) -> bool:
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def _nothing(summary: Summary) -> str:
    if not summary.skipped:
        return "there is nothing to pack"
    first = summary.skipped[0]
    return (f"none of {len(summary.skipped)} items could be packed; the first, {first.name}: "
            f"{first.reason}")


class _Report:
    """`skipped.jsonl`, a line as soon as something is skipped; no file when nothing is."""

    def __init__(self, folder: Path, summary: Summary, strict: bool):
        self._path, self._summary, self._file = folder / SKIPPED, summary, None
        self._strict = strict

    def __enter__(self) -> "_Report":
        self._path.unlink(missing_ok=True)
        return self

    def __exit__(self, *_) -> None:
        if self._file:
            self._file.close()

    def skip(self, name: str, reason: str) -> None:
        """Writes the line. Raises UserError when it must not happen."""
        self._summary.skipped.append(Skip(name, reason))
        self._file = self._file or open(self._path, "w", encoding="utf-8")
        self._file.write(json.dumps({"name": name, "reason": reason}) + "\n")
        self._file.flush()
        if self._strict:
            raise UserError(f"{name} cannot be packed: {reason} (without --strict it is skipped)")
