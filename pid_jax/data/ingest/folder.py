"""A folder of pictures, with captions in files beside them or in one table."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pid_jax.data import captions, tables
from pid_jax.data.ingest.pack import LARGEST_FILE, Item, Skip
from pid_jax.errors import UserError

PICTURE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif",
                              ".ppm", ".avif"))
FILE_FIELDS = ("file_name", "file", "image", "path")
PLAIN_FIELDS = ("caption", "text", "en_caption")
MISSING = ("skip", "empty")

Named = Mapping[str, str]


def folder_items(source: Path, table: Path | None = None, missing: str = "skip"
                 ) -> Iterator[Item | Skip]:
    """Every picture under `source`, sorted by path; its key is the path without the suffix.

    Args:
      source: folder; hidden files are ignored, links that leave it are skipped.
      table: JSON-lines or CSV file with captions; without it the captions of `a/b.jpg` are in
        `a/b.json` or else `a/b.txt`.
      missing: what to do with a picture without caption: "skip" it, or pack it with none ("empty").
    Raises: UserError when the folder or the table is missing, holds nothing or cannot be read.
    """
    if not source.is_dir():
        raise UserError(f"the source {source} is not a folder")
    found = list(_walk(source, source))
    pictures = [item for item in found if not isinstance(item, Skip)]
    if not pictures:
        raise UserError(f"{source} holds no pictures ({', '.join(sorted(PICTURE_SUFFIXES))})")
    if table is None:
        lookup = _Sidecars(source)
    else:
        lookup = _Table(table, source)
        yield from lookup.unusable(pictures)
    for entry in found:
        yield entry if isinstance(entry, Skip) else _item(source, entry, lookup, missing)


def _item(source: Path, relative: str, lookup: Callable[[str], Named], missing: str) -> Item:
    return Item(
        key=str(PurePosixPath(relative).with_suffix("")), name=relative,
        read=functools.partial(read_limited, source / relative),
        captions=functools.partial(_captions, lookup, relative, missing))


def _captions(lookup: Callable[[str], Named], relative: str, missing: str) -> Named:
    return check_missing(lookup(relative), missing)


def check_missing(found: Named, missing: str) -> Named:
    """`found`. Raises UserError when it is empty and `missing` is "skip"."""
    if not found and missing == "skip":
        raise UserError("it has no caption (--missing-captions empty packs it without)")
    return found


def read_limited(path: Path) -> bytes:
    """A file's bytes, at most one more than can be packed."""
    with open(path, "rb") as file:
        return file.read(LARGEST_FILE + 1)


def _walk(folder: Path, source: Path) -> Iterator[str | Skip]:
    """Relative paths of pictures, depth first in sorted order."""
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        if entry.name.startswith("."):
            continue
        path = Path(entry.path)
        relative = path.relative_to(source).as_posix()
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(path, source)
        elif entry.is_symlink() and path.is_dir():
            yield Skip(relative, "links to folders are not followed")
        elif path.suffix.lower() in PICTURE_SUFFIXES:
            yield check_place(path, source) or relative


def check_place(path: Path, source: Path) -> Skip | None:
    """Why the file cannot be read as part of `source`, or None."""
    relative = path.relative_to(source).as_posix()
    if not path.resolve().is_relative_to(source.resolve()):
        return Skip(relative, "it is a link that leaves the folder")
    if not path.is_file():
        return Skip(relative, "it is not a file, or a link to nothing")
    return None


@dataclasses.dataclass(frozen=True)
class _Sidecars:
    """Captions of `a/b.jpg` from `a/b.json` or `a/b.txt`."""

    source: Path

    def __call__(self, relative: str) -> Named:
        for suffix in PARSERS:
            path = (self.source / relative).with_suffix(suffix)
            if os.path.isfile(path):  # unlike Path's, no error for a name that is too long
                return _read_sidecar(path, self.source)
        return {}


def _read_sidecar(path: Path, source: Path) -> Named:
    if not path.resolve().is_relative_to(source.resolve()):
        raise UserError(f"its caption {path.name} is a link that leaves the folder")
    try:
        return parse_sidecar(path.name, read_limited(path))
    except OSError as error:
        raise UserError(f"its caption {path.name} cannot be read: {error.strerror}") from error


def parse_sidecar(name: str, data: bytes) -> Named:
    """The captions in a file called `name`, by its ending. Raises UserError."""
    try:
        return PARSERS[PurePosixPath(name).suffix.lower()](data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"its caption {name} is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"its caption {name} is not valid JSON: {error}") from error


def named(value: Any) -> Named:
    """Captions by name from a string, or a dict with prompt fields or one plain caption field.

    A plain caption is named "prompt". Blank captions count as none.
    """
    if isinstance(value, str):
        value = {"caption": value}
    if not isinstance(value, Mapping):
        return {}
    prompts = {k: v for k, v in captions.named_captions(value).items() if v.strip()}
    plain = [v for f in PLAIN_FIELDS if isinstance(v := value.get(f), str) and v.strip()]
    return prompts or {"prompt": text for text in plain[:1]}


PARSERS: Mapping[str, Callable[[str], Named]] = {
    ".json": lambda text: named(json.loads(text)),
    ".txt": lambda text: named({"caption": text.strip()})}


class _Table:
    """Captions by relative path from the rows of a table."""

    def __init__(self, table: Path, source: Path):
        self._rows: dict[str, tuple[str, Named]] = {}
        self._unusable: list[Skip] = []
        for where, row in tables.read_rows(table):
            try:
                self._add(where, row, source)
            except UserError as error:
                self._unusable.append(Skip(where, str(error)))

    def __call__(self, relative: str) -> Named:
        return self._rows[relative][1] if relative in self._rows else {}

    def unusable(self, pictures: Iterable[str]) -> Iterator[Skip]:
        """The rows that give no caption to any of `pictures`."""
        yield from self._unusable
        for relative in sorted(self._rows.keys() - set(pictures)):
            yield Skip(self._rows[relative][0], f"{relative!r} is not among the pictures packed")

    def _add(self, where: str, row: Any, source: Path) -> None:
        relative = row_file(row, source)
        if relative in self._rows:
            raise UserError(f"{relative} is listed twice; the first row counts")
        self._rows[relative] = where, row_captions(row)


def row_file(row: Any, source: Path) -> str:
    """The picture of a row, as a normal path inside `source`. Raises UserError."""
    if isinstance(row, UserError):
        raise row
    value = next((row[f] for f in FILE_FIELDS if isinstance(row.get(f), str) and row[f]), None)
    if value is None:
        raise UserError(f"it names no picture (fields: {', '.join(FILE_FIELDS)})")
    relative = os.path.normpath(value.replace("\\", "/"))
    if relative.startswith("..") or os.path.isabs(relative) or "\0" in relative:
        raise UserError(f"{value!r} leaves the folder")
    if not os.path.isfile(source / relative):
        raise UserError(f"{value[:200]!r} is not in {source}")
    return relative


def row_captions(row: Mapping[str, Any]) -> Named:
    """The named captions of a row. Raises UserError for text that is no text."""
    found = named({k: v for k, v in row.items() if k not in FILE_FIELDS})
    if any(0xDC80 <= ord(c) <= 0xDCFF for text in found.values() for c in text):
        raise UserError("its caption is not UTF-8 text")
    return found
