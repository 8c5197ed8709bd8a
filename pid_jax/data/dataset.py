"""A data set on disk: ArrayRecord shards, an index beside each, and a manifest, `dataset.json`.

A shard counts once the manifest names it; the manifest is rewritten after every shard. So whatever
interrupts a writer, the folder is a readable data set of the shards finished until then.
"""

import bisect
import collections
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from array_record.python.array_record_module import ArrayRecordWriter

from pid_jax.data import index as index_lib
from pid_jax.data import records
from pid_jax.data.records import CorruptRecord, Record
from pid_jax.data.shard_files import WRITER_OPTIONS, ShardFiles, write_errors
from pid_jax.errors import UserError
from pid_jax.files import atomic_write

MANIFEST = "dataset.json"
FORMAT = "pid_jax.dataset"
_SHARD_NAME = re.compile(r"shard-\d{5}\.arrayrecord")


class DatasetWriter:
    """Writes records into a folder, a context manager.

    Leaving the context finishes the last shard; after an exception too, so that nothing packed is
    lost, but then the manifest says `"complete": false`. A folder that holds a data set already is
    continued: its shards stay, further ones follow.

    Attributes:
      skipped: what the manifest says of items that were left out.
    """

    def __init__(self, folder: Path, shard_bytes: int = 256 << 20,
                 recipe: Mapping[str, Any] | None = None):
        """Args:
          folder: empty, missing, or a data set written with the same recipe.
          shard_bytes: a shard ends once it holds this much.
          recipe: how pictures become records, kept in the manifest.
        Raises: UserError when the folder holds a data set of another recipe, or a damaged one.
        """
        self._folder = Path(folder)
        self._shard_bytes = shard_bytes
        self._recipe = dict(recipe or {})
        self._keys: set[str] = set()
        self._shards: list[dict] = []
        self._sources = collections.Counter()
        self._captions = collections.Counter()
        self._buckets = collections.Counter()
        self._fingerprint = hashlib.sha256(FORMAT.encode())
        self._writer: ArrayRecordWriter | None = None
        self._rows = index_lib.IndexBuilder()
        self._filled = 0
        self.skipped = 0
        self._folder.mkdir(parents=True, exist_ok=True)
        self._continue()

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._finish_shard()
        self._write_manifest(complete=kind is None)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def keys(self) -> frozenset[str]:
        """The keys so far."""
        return frozenset(self._keys)

    def add(self, record: Record) -> None:
        """Appends a record. Raises UserError for a key that is already there."""
        if record.key in self._keys:
            raise UserError(f"duplicate key {record.key!r}")
        data = records.to_bytes(record)
        if self._writer is None:
            self._writer = ArrayRecordWriter(str(self._part_file), WRITER_OPTIONS)
        with write_errors(self._part_file):
            self._writer.write(data)
        self._rows.add(record, data)
        self._count(record, data)
        if self._filled >= self._shard_bytes:
            self._finish_shard()
            self._write_manifest(complete=False)

    @property
    def bytes_written(self) -> int:
        """Bytes of all records so far."""
        return sum(s["bytes"] for s in self._shards) + self._filled

    def _continue(self) -> None:
        """Takes over the finished shards of an earlier writer and removes the unfinished one."""
        for part in self._folder.glob(".shard-*.part"):
            part.unlink()
        if not (self._folder / MANIFEST).exists():
            return
        manifest = _parse_manifest(self._folder)
        if manifest.get("recipe", {}) != self._recipe:
            raise UserError(f"{self._folder} was packed otherwise ({manifest.get('recipe', {})}, "
                            f"now {self._recipe}); choose another destination, or --overwrite it")
        self._shards = manifest["shards"]
        self._sources.update(manifest["sources"])
        self._captions.update(manifest["captions"])
        for shard in self._shards:
            index = index_lib.load_index(index_path(self._folder / shard["file"]))
            self._keys.update(index.key[i] for i in range(len(index)))
            self._note(index)

    def _note(self, index: index_lib.Index) -> None:
        """Adds a shard's rows to the fingerprint and to the counts by aspect ratio."""
        self._buckets.update(index.bucket_counts())
        index.update_digest(self._fingerprint)

    def _count(self, record: Record, data: bytes) -> None:
        self._keys.add(record.key)
        self._sources[record.source] += 1
        self._captions.update(record.captions.keys())
        self._filled += len(data)

    @property
    def _shard_name(self) -> str:
        return f"shard-{len(self._shards):05d}.arrayrecord"

    @property
    def _part_file(self) -> Path:
        return self._folder / f".{self._shard_name}.part"

    def _finish_shard(self) -> None:
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        with write_errors(self._part_file):
            writer.close()
        index = self._rows.build()
        target = self._folder / self._shard_name
        digest = _sync_and_hash(self._part_file)
        os.replace(self._part_file, target)
        index_lib.save_index(index, self._rows.captions(), index_path(target))
        self._note(index)
        self._shards.append({"file": target.name, "records": len(index), "bytes": self._filled,
                             "sha256": digest})
        self._rows, self._filled = index_lib.IndexBuilder(), 0

    def _write_manifest(self, complete: bool) -> None:
        manifest = _manifest(self._shards, self._sources, self._captions, self._buckets,
                             self._fingerprint.hexdigest())
        manifest |= {"complete": complete, "skipped": self.skipped, "recipe": self._recipe}
        with atomic_write(self._folder / MANIFEST) as file:
            json.dump(manifest, file, indent=1)


def _manifest(shards: Sequence[Mapping[str, Any]], sources: collections.Counter,
              captions: collections.Counter, buckets: collections.Counter, fingerprint: str
              ) -> dict[str, Any]:
    return {
        "format": FORMAT, "schema": records.SCHEMA_VERSION, "complete": True,
        "records": sum(s["records"] for s in shards), "bytes": sum(s["bytes"] for s in shards),
        "skipped": 0, "recipe": {}, "sources": dict(sources), "captions": dict(captions),
        "buckets": dict(buckets.most_common()), "fingerprint": fingerprint, "shards": list(shards),
    }


def merge_manifests(parts: Sequence[Mapping[str, Any]], indices: Sequence[index_lib.Index],
                    skipped: int, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of the shards of several data sets, one set after another.

    Args:
      parts: their manifests; no two shards may have one name.
      indices: of all shards, in order.
    """
    sources, captions, buckets = (
        sum((collections.Counter(part[name]) for part in parts), collections.Counter())
        for name in ("sources", "captions", "buckets"))
    merged = _manifest([shard for part in parts for shard in part["shards"]], sources, captions,
                       buckets, fingerprint(index_lib.concatenate(indices)))
    return merged | {"skipped": skipped, "recipe": dict(recipe)}


class Dataset:
    """A packed folder with random access; safe to read from many threads and to send to workers.

    Attributes:
      folder: where it lies.
      manifest: the parsed `dataset.json`.
      index: columns over all records; `len(index)` records in all.
      shards: the files.
    """

    def __init__(self, folder: str | os.PathLike):
        """Raises UserError when the folder is no complete data set of a schema this one reads."""
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.shards = ShardFiles([self.folder / s["file"] for s in self.manifest["shards"]])
        parts = [index_lib.load_index(index_path(file)) for file in self.shards.files]
        _check_counts(self.manifest, parts, self.folder)
        self.index = index_lib.concatenate(parts)
        self._starts = list(itertools.accumulate((len(p) for p in parts[:-1]), initial=0))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> Record:
        """Record i. Raises CorruptRecord naming the shard and position."""
        if not 0 <= i < len(self):
            raise IndexError(f"record {i} of {len(self)}")
        shard = bisect.bisect_right(self._starts, i) - 1
        position = i - self._starts[shard]
        try:
            record = records.from_bytes(self.shards.read(shard, position))
            self._check_row(record, i)
        except CorruptRecord as error:
            raise CorruptRecord(f"record {position} of {self.shards.files[shard].name} (key "
                                f"{self.index.key[i]!r}) is damaged: {error}") from error
        return record

    def captions(self) -> Iterator[Mapping[str, str]]:
        """The captions of every record, by name, without its picture; {} for unreadable ones."""
        for file, start, shard in zip(self.shards.files, self._starts, self.manifest["shards"]):
            stored = index_lib.load_captions(index_path(file))
            yield from (self._read_captions(start, shard["records"]) if stored is None else stored)

    def _read_captions(self, start: int, count: int) -> Iterator[Mapping[str, str]]:
        """From the records themselves, of a data set whose index has none."""
        for i in range(start, start + count):
            try:
                yield self[i].captions
            except CorruptRecord:
                yield {}

    @property
    def fingerprint(self) -> str:
        """Identifies keys, sizes, contents and order of the records."""
        return self.manifest["fingerprint"]

    def _check_row(self, record: Record, i: int) -> None:
        row = (self.index.key[i], self.index.width[i], self.index.height[i])
        if (record.key, record.width, record.height) != row:
            raise CorruptRecord("it is not the record that the index lists")


def fingerprint(index: index_lib.Index) -> str:
    """What `Dataset.fingerprint` is for the records of an index."""
    sha = hashlib.sha256(FORMAT.encode())
    index.update_digest(sha)
    return sha.hexdigest()


def index_path(shard: Path) -> Path:
    """The index beside a shard."""
    return shard.with_suffix(".index.npz")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a data set.

    Raises: UserError when there is none, or it is damaged, of another schema or names files that
      are not there or not in the folder.
    """
    manifest = _parse_manifest(folder)
    if not manifest["shards"]:
        raise UserError(f"{folder} holds no pictures; pack it again")
    return manifest


def _parse_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        what = "has no dataset.json" if folder.is_dir() else "does not exist"
        raise UserError(f"{folder} is not a packed data set: it {what}; pack one with "
                        "`python -m pid_jax.data.ingest --src IMAGES --dst FOLDER`")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        shards = [(shard["file"], shard["records"]) for shard in manifest["shards"]]
        _check_kinds(manifest)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error!r}); pack the data set again") from error
    if (manifest.get("format"), manifest.get("schema")) != (FORMAT, records.SCHEMA_VERSION):
        raise UserError(f"{path} has format {manifest.get('format')!r} schema "
                        f"{manifest.get('schema')!r}; this program reads {FORMAT!r} schema "
                        f"{records.SCHEMA_VERSION}")
    for name, _ in shards:
        if not _SHARD_NAME.fullmatch(str(name)) or not (folder / name).is_file():
            raise UserError(f"{path} names the shard {name!r}, which is not in {folder}; copy it "
                            "there or pack the data set again")
    return manifest


def _check_kinds(manifest: dict[str, Any]) -> None:
    """Raises KeyError or TypeError for what `DatasetWriter` cannot have written."""
    for name, kind in (("complete", bool), ("bytes", int), ("sources", dict), ("captions", dict),
                       ("fingerprint", str)):
        if not isinstance(manifest[name], kind):
            raise TypeError(f"{name} is a {type(manifest[name]).__name__}")


def _check_counts(manifest: dict, parts: Sequence[index_lib.Index], folder: Path) -> None:
    for shard, part in zip(manifest["shards"], parts):
        if len(part) != shard["records"]:
            raise UserError(f"the index of {shard['file']} in {folder} lists {len(part)} records, "
                            f"its manifest {shard['records']}; pack the data set again")


def _sync_and_hash(file: Path) -> str:
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())
        return hashlib.file_digest(handle, "sha256").hexdigest()
