"""Downloads the pictures of a list of URLs, or of MultiAspect-4K-1M's metadata.

    python -m pid_jax.data.download --src METADATA --dst DOWNLOADS --max-json-files 10
    python -m pid_jax.data.download --src urls.parquet --dst DOWNLOADS --connections 64
    python -m pid_jax.data.ingest --format list --src DOWNLOADS/downloads.jsonl --dst DATASET

--src is a folder of JSON files (each one record or a list of them, with `image_url` and captions)
or a .jsonl, .csv or .parquet table with `url` or `image_url`, perhaps `key` (or `id`) and `sha256`
or `md5`. DOWNLOADS gets images/KEY.jpg and downloads.jsonl: a row for each picture, with its file,
hash and size, and every column of the list, such as its licence. failures.jsonl names what could
not be had, and why. Run again, the command goes on and tries what failed once more.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import errno
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pid_jax.data import command, listing
from pid_jax.data.destination import only_writer
from pid_jax.data.fetching import Failed, Fetcher, Limits, Picture
from pid_jax.errors import UserError
from pid_jax.files import atomic_write

DOWNLOADS, FAILURES, IMAGES = "downloads.jsonl", "failures.jsonl", "images"
SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp", "BMP": ".bmp", "TIFF": ".tif",
            "GIF": ".gif", "PPM": ".ppm", "AVIF": ".avif"}
HASHES = ("sha256", "md5")
_NAME = re.compile(r"[^./\\\x00-\x1f\x7f\ud800-\udfff][^/\\\x00-\x1f\x7f\ud800-\udfff]*")
_LONGEST_NAME = 200  # bytes
# Where a folder of that name is, or a picture stands where the key wants a folder.
_NO_FILE_NAME = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
_BLOCK = 1 << 16
_AHEAD = 4  # rows waiting for each connection


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a row: the row of downloads.jsonl, or the failure."""

    entry: listing.Entry
    key: str
    url: str | None
    row: Mapping[str, Any] | None = None
    failure: Failed | None = None


@dataclasses.dataclass
class Report:
    """Totals of a run: pictures there before, pictures and bytes fetched, failures by kind."""

    earlier: int = 0
    fetched: int = 0
    bytes: int = 0
    failed: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def lines(self, folder: Path) -> Iterator[str]:
        """For people."""
        yield f"downloaded {self.fetched} pictures ({self.bytes / 1e6:.1f} MB) into {folder}"
        if self.earlier:
            yield f"{self.earlier} were there already"
        if self.failed:
            yield f"failed {self.failed.total()}, listed in {folder / FAILURES}:"
            yield from (f"  {count} x {kind}" for kind, count in self.failed.most_common(8))


def download(entries: Iterable[listing.Entry], folder: Path, fetch: Callable[[str], Picture],
             connections: int, shown: Callable[[Report], None] = lambda report: None) -> Report:
    """Fetches what is not in `folder` yet; every finished picture counts, however this ends.

    Args:
      entries: the list.
      folder: see the module.
      fetch: URL -> picture; raises Failed.
      connections: how many are fetched at once.
      shown: called with the totals after every picture.
    Raises: UserError when another process downloads into `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder, "downloading"):
        rows = _Rows(folder)
        report = Report(earlier=len(rows.known))
        pool = concurrent.futures.ThreadPoolExecutor(connections)
        try:
            with rows, open(folder / FAILURES, "w", encoding="utf-8") as failures:
                for outcome in _finished(pool, lambda todo: _attempt(*todo, folder, fetch),
                                         rows.unfinished(entries), _AHEAD * connections):
                    _note(outcome, report, rows, failures)
                    shown(report)
        finally:
            pool.shutdown(cancel_futures=True)
        rows.sort()
    return report


def _finished(pool: concurrent.futures.Executor, function: Callable, items: Iterable, most: int
              ) -> Iterator[Any]:
    """`function` of the items, as each is done; at most `most` are waiting or at work."""
    running: set[concurrent.futures.Future] = set()
    for item in items:
        running.add(pool.submit(function, item))
        if len(running) >= most:
            done, running = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED)
            yield from (future.result() for future in done)
    yield from (future.result() for future in concurrent.futures.as_completed(running))


def _attempt(entry: listing.Entry, key: str, fresh: bool, folder: Path,
             fetch: Callable[[str], Picture]) -> Outcome:
    """Fetches a row; `fresh`: no other row had its key."""
    url = None
    try:
        url = _url(entry.row)
        safe_key(key)
        if not fresh:
            raise Failed("a duplicate key", key)
        picture = fetch(url)
        row = _row(entry.row, key, url, picture)
        with atomic_write(folder / row["file_name"], "wb") as file:
            file.write(picture.data)
        return Outcome(entry, key, url, row=row)
    except Failed as failure:
        return Outcome(entry, key, url, failure=failure)
    except OSError as error:
        if error.errno not in _NO_FILE_NAME:
            raise
        failure = Failed("a key that is no file name", f"{key[:80]!r}: {error.strerror}")
        return Outcome(entry, key, url, failure=failure)


def _url(row: Mapping[str, Any] | UserError) -> str:
    if isinstance(row, UserError):
        raise Failed("an unreadable row", str(row))
    url = listing.first_text(row, listing.URL_FIELDS)
    if url is None:
        raise Failed("no address", f"expected a column {' or '.join(listing.URL_FIELDS)}")
    return url


def key_of(entry: listing.Entry) -> str:
    """The list's key of a row, or else a hash of its address (of its place where it has none)."""
    if entry.key is not None:
        return entry.key
    row = entry.row if isinstance(entry.row, Mapping) else {}
    url = listing.first_text(row, listing.URL_FIELDS) or entry.where
    return hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def safe_key(key: str) -> None:
    """Raises Failed for a key that could name a file elsewhere; it may have folders."""
    names = key.split("/")
    if not all(_NAME.fullmatch(n) and len(n.encode()) <= _LONGEST_NAME for n in names):
        raise Failed("a key that is no file name", repr(key[:80]))


def _row(row: Mapping[str, Any], key: str, url: str, picture: Picture) -> dict[str, Any]:
    """A row of downloads.jsonl: the list's columns, under ours."""
    hashes = {name: hashlib.new(name, picture.data, usedforsecurity=False).hexdigest()
              for name in HASHES}
    for name in HASHES:
        wanted = row.get(name)
        if isinstance(wanted, str) and wanted.strip() and wanted.strip().lower() != hashes[name]:
            raise Failed("another picture than the list's", f"its {name} is {hashes[name]}")
    ours = {"key": key, "file_name": f"{IMAGES}/{key}{SUFFIXES[picture.format]}", "url": url,
            "sha256": hashes["sha256"], "bytes": len(picture.data), "width": picture.width,
            "height": picture.height, "content_type": picture.content_type}
    return ours | {name: value for name, value in row.items() if name not in ours}


def _note(outcome: Outcome, report: Report, rows: "_Rows", failures: IO) -> None:
    if outcome.row is not None:
        rows.add(outcome.row)
        report.fetched += 1
        report.bytes += outcome.row["bytes"]
        return
    failure = outcome.failure
    report.failed[failure.kind] += 1
    failures.write(json.dumps({"where": outcome.entry.where, "key": outcome.key,
                               "url": outcome.url, "reason": str(failure),
                               "attempts": failure.attempts}) + "\n")
    failures.flush()


class _Rows:
    """downloads.jsonl: appended to row by row; a row that was cut by a crash is dropped."""

    def __init__(self, folder: Path):
        """Reads which pictures are there, whole."""
        self._folder, self._path, self._file = folder, folder / DOWNLOADS, None
        if self._path.exists():
            self._drop_cut_row()
        self.known = {key for key, _, row in self._read() if self._is_there(row)}

    def __enter__(self) -> "_Rows":
        self._file = open(self._path, "ab")
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def unfinished(self, entries: Iterable[listing.Entry]
                   ) -> Iterator[tuple[listing.Entry, str, bool]]:
        """Entries that no earlier run fetched, with their key and whether it is the first such."""
        claimed: set[str] = set()
        for entry in entries:
            key = key_of(entry)
            if key not in self.known or key in claimed:
                yield entry, key, key not in claimed
            claimed.add(key)

    def add(self, row: Mapping[str, Any]) -> None:
        """Appends a row."""
        self._file.write(json.dumps(row, default=str).encode() + b"\n")
        self._file.flush()

    def sort(self) -> None:
        """Rewrites the file in the order of keys, so that it does not depend on the network."""
        places = {key: place for key, place, row in self._read() if self._is_there(row)}
        with open(self._path, "rb") as old, atomic_write(self._path, "wb") as new:
            for key in sorted(places):
                old.seek(places[key])
                new.write(old.readline())

    def _read(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            place = 0
            for line in file:
                try:
                    row = json.loads(line)
                    yield str(row["key"]), place, row
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f"{self._path} is damaged at byte {place}: {error}; remove "
                                    "that line") from error
                place += len(line)

    def _is_there(self, row: Mapping[str, Any]) -> bool:
        try:
            return os.path.getsize(self._folder / row["file_name"]) == row["bytes"]
        except (OSError, KeyError, TypeError, ValueError):
            return False

    def _drop_cut_row(self) -> None:
        with open(self._path, "rb+") as file:
            end = file.seek(0, os.SEEK_END)
            while end:
                start = max(0, end - _BLOCK)
                file.seek(start)
                if (newline := file.read(end - start).rfind(b"\n")) >= 0:
                    end = start + newline + 1
                    break
                end = start
            file.truncate(end)


class Bar:
    """A progress bar on stderr: drawn over itself on a terminal, else a line every 10 s."""

    def __init__(self, total: int):
        self._total, self._start, self._shown = total, time.monotonic(), 0.0
        self._every = 0.2 if sys.stderr.isatty() else 10.0

    def __call__(self, report: Report) -> None:
        """Draws the totals, if it is time."""
        now = time.monotonic()
        done = report.earlier + report.fetched + report.failed.total()
        if now - self._shown < self._every and done < self._total:
            return
        self._shown = now
        filled = 30 * min(done, self._total) // max(1, self._total)
        rate = report.bytes / 1e6 / max(1e-3, now - self._start)
        end = "\r" if sys.stderr.isatty() and done < self._total else "\n"
        print(f"[{'#' * filled:.<30}] {done}/{self._total}, {report.failed.total()} failed, "
              f"{rate:.1f} MB/s", end=end, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> None:
    """Parses the command line and downloads. Raises UserError when nothing could be had."""
    options = _parse(arguments)
    limits = Limits(timeout=options.timeout, bytes=int(options.max_mb * (1 << 20)),
                    retries=options.retries)

    def entries() -> Iterator[listing.Entry]:
        found = listing.entries(options.src, options.max_json_files)
        return map(as_metadata, found) if options.src.is_dir() else found

    bar = Bar(sum(1 for _ in entries()))
    report = download(entries(), options.dst, Fetcher(options.connections, limits).fetch,
                      options.connections, bar)
    for line in report.lines(options.dst):
        command.show(line)
    if not report.earlier + report.fetched:
        raise UserError(f"no picture could be downloaded; see {options.dst / FAILURES}")


def as_metadata(entry: listing.Entry) -> listing.Entry:
    """A row of MultiAspect-4K-1M with the reference's choice of caption, as `prompt`."""
    if isinstance(entry.row, UserError):
        return entry
    text = listing.first_text(entry.row, listing.METADATA_CAPTIONS)
    rest = {k: v for k, v in entry.row.items() if k not in listing.METADATA_CAPTIONS}
    return dataclasses.replace(entry, row=rest | ({"prompt": text} if text else {}))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command.Parser(prog="python -m pid_jax.data.download", description=__doc__)
    parser.add_argument("--src", type=Path, required=True, help="metadata folder, or a table")
    parser.add_argument("--dst", type=Path, required=True, help="folder of the downloads")
    parser.add_argument("--max-json-files", type=command.count, metavar="N",
                        help="only the first N files of a metadata folder, for a trial")
    parser.add_argument("--connections", type=command.count, default=32,
                        help="pictures fetched at once")
    parser.add_argument("--retries", type=int, default=4, choices=range(21), metavar="N",
                        help="further attempts after one that failed in passing")
    parser.add_argument("--timeout", type=command.positive, default=20, metavar="SECONDS",
                        help="without an answer, or without further bytes")
    parser.add_argument("--max-mb", type=command.positive, default=200, metavar="MIB",
                        help="refuse larger pictures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
