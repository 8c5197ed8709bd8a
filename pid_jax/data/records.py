"""The record: one picture with its captions, and its bytes in an ArrayRecord shard.

Bytes of a record: "PIDR", one byte of schema version, the CRC-32 of the rest (little endian), then
a msgpack array [key, source, width, height, captions, image].
"""

import dataclasses
import struct
import zlib
from collections.abc import Mapping

import msgpack

from pid_jax.errors import UserError

MAGIC = b"PIDR"
SCHEMA_VERSION = 1
_HEADER = struct.Struct("<4sBI")


class CorruptRecord(UserError):
    """A record that cannot be read back; one bad record never ends an epoch."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One picture.

    Attributes:
      key: unique name within a data set.
      source: the collection it came from.
      width, height: pixels, as seen upright.
      captions: name -> text, such as {"prompt": ..., "prompt_short": ...}; may be empty.
      image: the picture file's bytes, as they were given.
    """

    key: str
    source: str
    width: int
    height: int
    captions: Mapping[str, str]
    image: bytes


def to_bytes(record: Record) -> bytes:
    """Serialises. Raises UserError for text that UTF-8 cannot hold (lone surrogates)."""
    fields = [record.key, record.source, record.width, record.height, dict(record.captions),
              record.image]
    try:
        payload = msgpack.packb(fields)
    except UnicodeEncodeError as error:
        raise UserError(f"record {record.key!r} has text that is not valid Unicode") from error
    return _HEADER.pack(MAGIC, SCHEMA_VERSION, zlib.crc32(payload)) + payload


def from_bytes(data: bytes) -> Record:
    """The inverse of `to_bytes`. Raises CorruptRecord when anything is not as it was written."""
    if len(data) < _HEADER.size or data[:4] != MAGIC:
        raise CorruptRecord("it does not begin like a record")
    _, version, checksum = _HEADER.unpack_from(data)
    if version != SCHEMA_VERSION:
        raise CorruptRecord(f"its schema version is {version}; this program reads "
                            f"{SCHEMA_VERSION}")
    payload = memoryview(data)[_HEADER.size:]
    if zlib.crc32(payload) != checksum:
        raise CorruptRecord("its checksum does not match")
    try:
        return _checked(Record(*msgpack.unpackb(payload)))
    except (ValueError, TypeError) as error:  # msgpack's own errors are ValueErrors.
        raise CorruptRecord(f"its fields are not those of a record: {error}") from error


def _checked(record: Record) -> Record:
    for field in dataclasses.fields(Record):
        value = getattr(record, field.name)
        expected = dict if field.name == "captions" else field.type
        if not isinstance(value, expected):
            raise TypeError(f"{field.name} is a {type(value).__name__}")
    return record


def checksum_of(data: bytes) -> int:
    """The CRC-32 that serialised bytes carry."""
    return _HEADER.unpack_from(data)[2]
