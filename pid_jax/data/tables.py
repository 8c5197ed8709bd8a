"""Rows of JSON-lines, CSV and Parquet files, read a piece at a time."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from pid_jax.errors import UserError, one_line

_PARQUET_ROWS = 1024

Rows = Iterator[tuple[str, Any]]


def read_rows(table: Path) -> Rows:
    """("file line N", row) of a table; a row that cannot be parsed is a UserError object.

    Bytes that are not UTF-8 become lone surrogates, which are no valid text.
    Raises: UserError when the file cannot be read at all.
    """
    suffix = table.suffix.lower()
    if suffix == ".parquet":
        yield from _parquet_rows(table)
    elif suffix in _READERS:
        yield from _text_rows(table, _READERS[suffix])
    else:
        raise UserError(f"{table} is neither .jsonl nor .csv nor .parquet")


def _text_rows(table: Path, reader: Callable[[IO], Iterator[tuple[int, Any]]]) -> Rows:
    try:
        with open(table, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            for line, row in reader(file):
                yield f"{table.name} line {line}", row
    except OSError as error:
        raise UserError(f"{table} cannot be read: {error.strerror}") from error


def _json_rows(file: IO) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, json_object(line)


def json_object(text: str) -> Any:
    """The mapping that JSON text holds, or a UserError object that says what is wrong."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        return UserError(f"it is not JSON: {error}")
    return row if isinstance(row, Mapping) else UserError("it is not a JSON object")


def _csv_rows(file: IO) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(file)
    try:
        for row in reader:
            yield reader.line_num, {k: v for k, v in row.items() if k is not None}
    except csv.Error as error:
        raise UserError(f"the CSV cannot be read at line {reader.line_num}: {error}") from error


_READERS = {".jsonl": _json_rows, ".csv": _csv_rows}


def _parquet_rows(table: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(table) as file:
            for batch in file.iter_batches(_PARQUET_ROWS):
                for position in range(len(batch)):
                    number += 1
                    yield f"{table.name} row {number}", _parquet_row(batch.slice(position, 1))
    except (OSError, pyarrow.ArrowException) as error:
        reason = one_line(error, 200)
        raise UserError(f"{table} cannot be read after row {number}: {reason}") from error


def _parquet_row(row: Any) -> Any:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError:
        return UserError("it holds text that is not UTF-8")
