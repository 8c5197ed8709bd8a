"""Pictures that a list names: a table with their files, or MultiAspect-4K-1M's metadata."""

import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pid_jax.data import listing
from pid_jax.data.ingest.folder import (PICTURE_SUFFIXES, Named, check_missing, check_place,
                                        read_limited, row_captions, row_file)
from pid_jax.data.ingest.labelled import LABEL
from pid_jax.data.ingest.pack import Item, Skip
from pid_jax.errors import UserError


def listed_items(table: Path, images: Path | None = None, missing: str = "skip"
                 ) -> Iterator[Item | Skip]:
    """The pictures of a .jsonl, .csv or .parquet table, in its order.

    Args:
      table: rows with `file_name` (or `file`, `image`, `path`), captions as in `folder`, and
        perhaps `key` (or `id`) and `label`; `python -m pid_jax.data.download` writes such a list.
      images: the folder that file names are relative to; default: the table's.
      missing: see `folder.folder_items`.
    """
    if table.is_dir():
        raise UserError(f"the list {table} is a folder; name a .jsonl, .csv or .parquet file")
    images = images or table.parent
    for entry in listing.entries(table):
        try:
            relative = row_file(entry.row, images)
        except UserError as error:
            yield Skip(entry.where, str(error))
            continue
        key = entry.key or str(PurePosixPath(relative).with_suffix(""))
        yield _item(images, relative, key, functools.partial(_captions, entry.row, missing))


def multiaspect_items(metadata: Path, images: Path, missing: str = "skip"
                      ) -> Iterator[Item | Skip]:
    """The downloaded pictures of MultiAspect-4K-1M's metadata.

    Args:
      metadata: folder of JSON files.
      images: folder with `KEY.jpg` (or another ending) for the keys of `listing.entries`.
      missing: see `folder.folder_items`.
    """
    present = _pictures(images)
    for entry in listing.entries(metadata):
        if isinstance(entry.row, UserError):
            yield Skip(entry.where, str(entry.row))
        elif entry.key not in present:
            yield Skip(entry.where, f"its picture {entry.key} is not in {images}: download it")
        else:
            yield _item(images, present[entry.key], entry.key,
                        functools.partial(_metadata_captions, entry.row, missing))


def _pictures(folder: Path) -> dict[str, str]:
    """Key -> relative path of the pictures in a folder and its sub-folders."""
    if not folder.is_dir():
        raise UserError(f"the pictures {folder} are not a folder; name it with --images")
    return {Path(name).stem: os.path.relpath(os.path.join(parent, name), folder)
            for parent, _, names in os.walk(folder) for name in names
            if Path(name).suffix.lower() in PICTURE_SUFFIXES and not name.startswith(".")}


def _item(images: Path, relative: str, key: str, captions: Any) -> Item | Skip:
    return check_place(images / relative, images) or Item(
        key, relative, functools.partial(read_limited, images / relative), captions)


def _captions(row: Mapping[str, Any], missing: str) -> Named:
    label = row.get(LABEL)
    named = {LABEL: str(label)} if isinstance(label, (int, str)) and str(label) else {}
    return check_missing({**row_captions(row), **named}, missing)


def _metadata_captions(row: Mapping[str, Any], missing: str) -> Named:
    text = listing.first_text(row, listing.METADATA_CAPTIONS)
    return check_missing({"prompt": text} if text else {}, missing)
