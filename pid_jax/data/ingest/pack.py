"""From items of any collection to a packed data set, with a report of what was left out."""

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from pid_jax import images
from pid_jax.data.command import show
from pid_jax.data.dataset import SKIPPED, DatasetWriter, check_destination, staged_folder
from pid_jax.data.records import Record
from pid_jax.errors import UserError

LARGEST_FILE = 1 << 30
_PROGRESS_SECONDS = 10


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
    """What became of a collection."""

    packed: int = 0
    bytes: int = 0
    skipped: list[Skip] = dataclasses.field(default_factory=list)

    def lines(self, folder: Path) -> Iterator[str]:
        """For people: totals, and the first few skips by name."""
        yield f"packed {self.packed} pictures ({self.bytes / 1e6:.1f} MB) into {folder}"
        if self.skipped:
            yield f"skipped {len(self.skipped)}, listed in {folder / SKIPPED}:"
            yield from (f"  {skip.name}: {skip.reason}" for skip in self.skipped[:5])
        if len(self.skipped) > 5:
            yield "  ..."


@contextlib.contextmanager
def destination(target: Path, overwrite: bool) -> Iterator[Path]:
    """Yields the folder to write into.

    A fresh target is written in place, so that an interrupted run leaves what it packed; one that
    is replaced stays as it was until its successor is complete. A fresh target in which nothing
    was packed is removed again.
    """
    check_destination(target, overwrite)
    if target.exists() and any(target.iterdir()):
        with staged_folder(target, overwrite) as stage:
            yield stage
        return
    try:
        yield target
    except BaseException:
        if not any(target.glob("shard-*.arrayrecord")):
            shutil.rmtree(target, ignore_errors=True)
        raise


def pack(items: Iterable[Item | Skip], folder: Path, source: str, shard_bytes: int,
         min_side: int = 1) -> Summary:
    """Packs items into the empty or missing `folder`, in their order.

    Args:
      items: the collection; bad ones are skipped, named in `skipped.jsonl` and the summary.
      folder: where the data set goes.
      source: the collection's name, kept in every record.
      shard_bytes: see `DatasetWriter`.
      min_side: pictures with a shorter side below this are skipped.
    Raises: UserError when every item was skipped, or the disk cannot be written.
    """
    summary = Summary()
    clock = time.monotonic()
    with DatasetWriter(folder, shard_bytes) as writer, _Report(folder, summary) as report:
        for item in items:
            try:
                record = _to_record(item, source, min_side, writer)
            except UserError as error:
                report.skip(item.name, str(error))
                continue
            writer.add(record)
            summary.packed, summary.bytes = len(writer), writer.bytes_written
            if time.monotonic() - clock > _PROGRESS_SECONDS:
                clock = time.monotonic()
                show(f"... {summary.packed} packed, {len(summary.skipped)} skipped")
    if not summary.packed:
        raise UserError(_nothing(summary))
    return summary


def _to_record(item: Item | Skip, source: str, min_side: int, writer: DatasetWriter) -> Record:
    """The record of an item. Raises UserError with the reason when it has to be skipped."""
    if isinstance(item, Skip):
        raise UserError(item.reason)
    if item.key in writer:
        raise UserError(f"duplicate key {item.key!r}: another picture has the same name")
    captions = dict(item.captions())
    if not all(map(_is_unicode, (item.key, *captions, *captions.values()))):
        raise UserError("its name or caption is not valid UTF-8 text")
    data = _read(item)
    # Decoding is the only proof that a file is whole.
    width, height = images.decode(data).size
    if min(width, height) < min_side:
        raise UserError(f"it is {width} x {height}, smaller than --min-side {min_side}")
    return Record(item.key, source, width, height, captions, data)


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

    def __init__(self, folder: Path, summary: Summary):
        self._path, self._summary, self._file = folder / SKIPPED, summary, None

    def __enter__(self) -> "_Report":
        return self

    def __exit__(self, *_) -> None:
        if self._file:
            self._file.close()

    def skip(self, name: str, reason: str) -> None:
        self._summary.skipped.append(Skip(name, reason))
        self._file = self._file or open(self._path, "w", encoding="utf-8")
        self._file.write(json.dumps({"name": name, "reason": reason}) + "\n")
        self._file.flush()
