"""Collections that are lists: rows with the URL or the file of a picture, its captions and more.

A list is a JSON-lines, CSV or Parquet file, or the metadata of MultiAspect-4K-1M: a folder of JSON
files, each one record or a list of them.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pid_jax.data import tables
from pid_jax.errors import UserError

URL_FIELDS = ("image_url", "url")
KEY_FIELDS = ("key", "id")
# The reference takes the first that is not blank, and calls it by all three prompt names.
METADATA_CAPTIONS = ("en_caption", "caption", "prompt", "prompt_medium", "prompt_short")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row.

    Attributes:
      where: what reports call it.
      key: name of the picture, or None when the list gives none.
      row: the columns; or the UserError that says why there are none.
    """

    where: str
    key: str | None
    row: Mapping[str, Any] | UserError


def entries(source: Path, max_files: int | None = None) -> Iterator[Entry]:
    """The rows of a table, or of the JSON files of a folder (of the first `max_files` by name).

    Raises: UserError when there is nothing to read.
    """
    if source.is_dir():
        yield from _metadata(source, max_files)
        return
    if not source.is_file():
        raise UserError(f"there is no list {source}; name a .jsonl, .csv or .parquet file, or a "
                        "folder of JSON files")
    for where, row in tables.read_rows(source):
        yield Entry(where, _key(row), row)


def first_text(row: Mapping[str, Any], fields: Sequence[str]) -> str | None:
    """The first of `fields` that is a text and not blank, stripped."""
    texts = (value.strip() for f in fields if isinstance(value := row.get(f), str))
    return next(filter(None, texts), None)


def _key(row: Any) -> str | None:
    if not isinstance(row, Mapping):
        return None
    found = (row[f] for f in KEY_FIELDS if isinstance(row.get(f), (str, int)) and row[f] != "")
    return next(map(str, found), None)


def _metadata(folder: Path, max_files: int | None) -> Iterator[Entry]:
    files = sorted(path for path in folder.rglob("*.json") if path.is_file())
    if not files:
        raise UserError(f"{folder} holds no .json files; expected the metadata of "
                        "MultiAspect-4K-1M")
    for path in itertools.islice(files, max_files):
        yield from _file_entries(path, path.relative_to(folder).as_posix())


def _file_entries(path: Path, where: str) -> Iterator[Entry]:
    """Keys are the reference's: the file's name, or NAME_000012 for the records of a list."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        found = UserError(f"it cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        found = UserError("it is not UTF-8 text")
    except (ValueError, RecursionError) as error:
        found = UserError(f"it is not JSON: {error}")
    if not isinstance(found, list):
        yield Entry(where, path.stem, _record(found))
        return
    for number, record in enumerate(found):
        yield Entry(f"{where} record {number}", f"{path.stem}_{number:06d}", _record(record))


def _record(found: Any) -> Mapping[str, Any] | UserError:
    if isinstance(found, (Mapping, UserError)):
        return found
    return UserError("it is not a JSON object")
