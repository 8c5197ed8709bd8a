"""`.pth`, `.pt`, `.bin`, `.ckpt`: torch's zip form and its older stream, without torch."""

import io
import zipfile
from pathlib import Path
from typing import IO, Any

from tools.convert_torch_weights.readers.tensors import (
    LazyTensor, Region, Source, Unreadable, shown)
from tools.convert_torch_weights.readers.torch_objects import (
    StorageRef, TensorRef, contents, lazy_tensors, read_program)

MAX_PICKLE = 256 << 20
_LOCAL_HEADER = 30
_ENCRYPTED = 0x1
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_ZIP_FAULTS = (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError)


def open_torch_file(path: Path) -> Source:
    """Opens either form.

    Raises:
      Unreadable: not such a file, cut short, damaged, or asking to run something.
    """
    with open(path, "rb") as file:
        start = file.read(4)
        if not start:
            raise Unreadable(path, "the file is empty")
        if start == b"PK\x03\x04":
            tensors, other = read_zip(path, file)
            return Source(path, "torch zip", tensors, other, (path,))
        if start[:1] == b"\x80":
            tensors, other = _read_legacy(path, file)
            return Source(path, "torch legacy stream", tensors, other, (path,))
    raise Unreadable(path, "it is neither a torch file nor a pickle (its first bytes are "
                     f"{start.hex(' ')})")


class Window(io.RawIOBase):
    """A read-only file that shows `length` bytes of `file` from `start` on."""

    def __init__(self, file: IO[bytes], start: int, length: int):
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer) -> int:
        wanted = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._start + self._at)
        found = self._file.read(wanted)
        buffer[:len(found)] = found
        self._at += len(found)
        return len(found)


def read_everything(path: Path) -> dict[str, Any]:
    """What a torch file in zip form holds: names (nested keys joined by dots) -> a `LazyTensor` or
    plain data.

    Raises:
      Unreadable: as `open_torch_file`.
    """
    with open(path, "rb") as file:
        archive = _Archive(path, file, 0, None)
        tensors, _ = read_zip(path, file)
        value = read_program(path, io.BytesIO(archive.bytes_of("data.pkl")))
    return {name: tensors.get(name, item) for name, item in contents(path, value)}


def read_zip(path: Path, file: IO[bytes], start: int = 0, length: int | None = None
             ) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Tensors and other contents of a torch zip: `length` bytes of `file` from `start` on."""
    archive = _Archive(path, file, start, length)
    if archive.bytes_of("byteorder", b"little").strip() != b"little":
        raise Unreadable(path, "it was written on a big-endian machine; save it again on a "
                         "little-endian one")
    value = read_program(path, io.BytesIO(archive.bytes_of("data.pkl")))
    return lazy_tensors(path, value, lambda storage: archive.region(f"data/{storage.key}"))


class _Archive:
    """The members of a torch zip by name, as places in the file: they are stored uncompressed.

    The members' checksums are not used: torch may write files without them.
    """

    def __init__(self, path: Path, file: IO[bytes], start: int, length: int | None):
        self._path, self._file, self._start = path, file, start
        self._length = file.seek(0, io.SEEK_END) if length is None else length
        try:
            members = zipfile.ZipFile(Window(file, start, self._length)).infolist()
        except _ZIP_FAULTS as error:
            raise Unreadable(path, "the archive is cut short or damaged (its list of members at "
                             "the end is missing)") from error
        self._members = {info.filename: info for info in members}
        if len(self._members) != len(members):
            raise Unreadable(path, "two members of the archive have the same name")
        roots = [name.removesuffix("data.pkl") for name in self._members
                 if name.rpartition("/")[2] == "data.pkl" and name.count("/") <= 1]
        if len(roots) != 1:
            raise Unreadable(path, "the zip archive holds no data.pkl, so torch did not write it")
        self._root = roots[0]

    def region(self, name: str) -> Region:
        """Where a member's bytes lie. Raises KeyError when there is none."""
        info = self._members[self._root + name]
        self._file.seek(self._start + max(0, info.header_offset))
        header = self._file.read(_LOCAL_HEADER)
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        offset = info.header_offset + _LOCAL_HEADER + names
        inside = info.header_offset >= 0 and offset + info.file_size <= self._length
        plain = (info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & _ENCRYPTED
                 and info.compress_size == info.file_size)
        if not inside or header[:4] != b"PK\x03\x04" or not plain:
            raise Unreadable(self._path, f"the archive member '{shown(name)}' is damaged, "
                             "compressed or encrypted")
        return Region(self._path, self._start + offset, info.file_size)

    def bytes_of(self, name: str, missing: bytes = b"") -> bytes:
        """The contents of a small member."""
        if self._root + name not in self._members:
            return missing
        region = self.region(name)
        if region.nbytes > MAX_PICKLE:
            raise Unreadable(self._path, f"its {name} has {region.nbytes} bytes")
        self._file.seek(region.offset)
        return self._file.read(region.nbytes)


def _read_legacy(path: Path, file: IO[bytes]) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Five pickles (magic, version, machine, value, storage keys), then the storages in order."""
    file.seek(0)
    if read_program(path, file) != _LEGACY_MAGIC:
        raise Unreadable(path, "it is a plain pickle, not a torch file")
    read_program(path, file)
    machine = read_program(path, file)
    if not (isinstance(machine, dict) and machine.get("little_endian") is True):
        raise Unreadable(path, "it was not written on a little-endian machine")
    value = read_program(path, file)
    regions = _legacy_regions(path, file, read_program(path, file), _storages(path, value))
    return lazy_tensors(path, value, lambda storage: regions[storage.key])


def _storages(path: Path, value) -> dict[str, StorageRef]:
    return {item.storage.key: item.storage for _, item in contents(path, value)
            if isinstance(item, TensorRef)}


def _legacy_regions(path: Path, file: IO[bytes], keys, storages) -> dict[str, Region]:
    """Each storage is an element count in eight bytes, then the elements."""
    if not isinstance(keys, list):
        raise Unreadable(path, "its list of storages is damaged")
    offset, end = file.tell(), file.seek(0, io.SEEK_END)
    regions = {}
    for key in keys:
        if not isinstance(key, str) or key not in storages:
            raise Unreadable(path, "it stores data that no tensor uses")
        file.seek(offset)
        count = int.from_bytes(file.read(8), "little")
        nbytes = count * storages[key].dtype.itemsize
        regions[key] = Region(path, offset + 8, nbytes)
        offset += 8 + nbytes
        if offset > end:
            raise Unreadable(path, f"it is cut short: {end} bytes of at least {offset}")
    return regions
