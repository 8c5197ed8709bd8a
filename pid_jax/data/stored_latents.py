"""Latents that were computed once, beside a data set: training then encodes nothing.

A folder holds, for every process that encoded, `latents-I-of-N.json` (what the latents depend on,
records, records of a file) and files `latents-I-P.arrayrecord`. Record number r of the data set is
with process r mod N. `python -m pid_jax.embed_latents` makes it.

Bytes of an entry: "PIDL", version, dtype, 8 bytes of the origin's digest, number of the record,
h, w, C, the CRC-32 of the rest (little endian), then the latent. An entry of a picture that could
not be read, or that no bucket takes, has h = 0.
"""

import hashlib
import json
import os
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from pid_jax.data.records import CorruptRecord
from pid_jax.data.shard_files import WRITER_OPTIONS, ShardFiles, write_errors
from pid_jax.errors import UserError
from pid_jax.files import atomic_write

MAGIC, VERSION = b"PIDL", 1
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_HEADER = struct.Struct("<4sBB8sQIIII")
_MANIFEST = re.compile(r"latents-(\d{5})-of-(\d{5})\.json")

Origin = Mapping[str, str]


def to_bytes(record: int, latent: np.ndarray | None, dtype: str, origin: Origin) -> bytes:
    """An entry of latent [h, w, C], or of a picture that has none."""
    shape = (0, 0, 0) if latent is None else latent.shape
    payload = b"" if latent is None else np.ascontiguousarray(latent, DTYPES[dtype]).tobytes()
    return _HEADER.pack(MAGIC, VERSION, list(DTYPES).index(dtype), digest(origin), record, *shape,
                        zlib.crc32(payload)) + payload


def from_bytes(data: bytes, record: int, origin: Origin) -> np.ndarray:
    """The latent float32 [h, w, C] of a record. Raises CorruptRecord when there is none."""
    if len(data) < _HEADER.size or data[:5] != MAGIC + bytes([VERSION]):
        raise CorruptRecord("its latent does not begin like one")
    _, _, kind, made_for, number, *shape, checksum = _HEADER.unpack_from(data)
    payload = memoryview(data)[_HEADER.size:]
    if (number, made_for) != (record, digest(origin)) or kind >= len(DTYPES):
        raise CorruptRecord("its latent is another picture's")
    if not shape[0]:
        raise CorruptRecord("it has no latent: it could not be read when they were made")
    dtype = list(DTYPES.values())[kind]
    if zlib.crc32(payload) != checksum or len(payload) != np.prod(shape) * dtype.itemsize:
        raise CorruptRecord("the checksum of its latent does not match")
    return np.frombuffer(payload, dtype).reshape(shape).astype(np.float32)


def digest(origin: Origin) -> bytes:
    """8 bytes that stand for what latents depend on."""
    return hashlib.sha256(json.dumps(dict(origin), sort_keys=True).encode()).digest()[:8]


def write_file(path: Path, entries: Sequence[bytes]) -> None:
    """Writes one file, complete or not at all. Raises UserError when the disk cannot take it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with write_errors(part):
        writer = ArrayRecordWriter(str(part), WRITER_OPTIONS)
        for entry in entries:
            writer.write(entry)
        writer.close()
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


def is_whole(path: Path, records: Sequence[int], origin: Origin) -> bool:
    """Whether a file holds the entries of `records`. Raises UserError for those of others."""
    if not path.exists():
        return False
    try:
        reader = ShardFiles([path]).reader(0)
        ends = reader.read([0])[0], reader.read([reader.num_records() - 1])[0]
        heads = [_HEADER.unpack_from(data) for data in ends]
        count = reader.num_records()
    except (RuntimeError, ValueError, IndexError, struct.error):
        return False
    if any(head[3] != digest(origin) for head in heads):
        raise UserError(f"{path} holds latents of other data or another codec; choose an empty "
                        "--dst, or remove the folder")
    return count == len(records) and [head[4] for head in heads] == [records[0], records[-1]]


def file_name(process: int, part: int) -> str:
    """The name of a process's file number `part`."""
    return f"latents-{process:05d}-{part:05d}.arrayrecord"


def write_manifest(folder: Path, process: int, processes: int, **facts: Any) -> None:
    """Says that a process is done."""
    with atomic_write(folder / f"latents-{process:05d}-of-{processes:05d}.json") as file:
        json.dump({"version": VERSION, **facts}, file, indent=1)


class StoredLatents:
    """The latents of a folder; safe to read from many threads and to send to workers.

    Attributes:
      origin: what they depend on, by name.
    """

    def __init__(self, folder: str | Path):
        """Raises: UserError when the folder is no complete set of latents."""
        self._folder = Path(folder)
        manifests = _read_manifests(self._folder)
        self.origin: Origin = manifests[0]["origin"]
        self._records, self._rows = manifests[0]["records"], manifests[0]["rows"]
        self._processes = len(manifests)
        names = [file_name(process, part) for process in range(self._processes)
                 for part in range(self._parts(process))]
        self._firsts = np.cumsum([0, *map(self._parts, range(self._processes))]).tolist()
        if missing := next((n for n in names if not (self._folder / n).is_file()), None):
            raise UserError(f"{self._folder} lacks {missing}; run `python -m "
                            "pid_jax.embed_latents` again")
        self._files = ShardFiles([self._folder / name for name in names])

    def _parts(self, process: int) -> int:
        mine = len(range(process, self._records, self._processes))
        return -(-mine // self._rows)

    def of_record(self, record: int) -> np.ndarray:
        """float32 [h, w, C]. Raises CorruptRecord when there is none, or it is damaged."""
        place, process = divmod(record, self._processes)
        part, position = divmod(place, self._rows)
        return from_bytes(self._files.read(self._firsts[process] + part, position), record,
                          self.origin)

    def check(self, wanted: Origin) -> None:
        """Raises UserError when the latents depend on something else."""
        for name, value in wanted.items():
            if self.origin.get(name) != value:
                raise UserError(f"the latents in {self._folder} were made for {name} "
                                f"{self.origin.get(name)!r}, this run has {value!r}; make them "
                                "anew with `python -m pid_jax.embed_latents`")


def _read_manifests(folder: Path) -> list[dict[str, Any]]:
    """The manifests of all processes, in order."""
    names = sorted(p.name for p in folder.glob("latents-*.json")) if folder.is_dir() else []
    matches = [match for name in names if (match := _MANIFEST.fullmatch(name))]
    totals = {int(match[2]) for match in matches}
    if len(totals) != 1 or len(matches) != max(totals):
        raise UserError(f"{folder} holds no complete latents (found: {', '.join(names) or 'none'})"
                        "; make them with `python -m pid_jax.embed_latents`, every process of it")
    manifests = [_read_manifest(folder / match[0]) for match in matches]
    if any(manifest != manifests[0] for manifest in manifests):
        raise UserError(f"the latents in {folder} were made in different ways; make them again")
    return manifests


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        sound = (manifest["version"] == VERSION and isinstance(manifest["origin"], dict)
                 and all(isinstance(manifest[name], int) and manifest[name] > 0
                         for name in ("records", "rows")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}; make the latents again") from error
    if not sound:
        raise UserError(f"{path} is no list of latents of this version")
    return manifest
