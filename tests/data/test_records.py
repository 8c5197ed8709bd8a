import zlib

import msgpack
import pytest

from pid_jax.data import records
from pid_jax.data.records import CorruptRecord, Record
from pid_jax.errors import UserError
from tests.data.sets import record


def test_round_trip_keeps_everything():
    original = Record("schlüssel/猫", "源", 7, 9, {"prompt": "قطة", "empty": ""}, b"\0\xff image")
    assert records.from_bytes(records.to_bytes(original)) == original


def test_every_altered_byte_is_noticed():
    data = records.to_bytes(record(1, 8, 8))
    for i in range(len(data)):
        altered = data[:i] + bytes([data[i] ^ 1]) + data[i + 1:]
        with pytest.raises(CorruptRecord):
            records.from_bytes(altered)


def test_every_truncation_is_noticed():
    data = records.to_bytes(record(1, 8, 8))
    for length in range(len(data)):
        with pytest.raises(CorruptRecord):
            records.from_bytes(data[:length])


def test_other_schema_versions_are_named():
    data = bytearray(records.to_bytes(record(1)))
    data[4] = 99
    with pytest.raises(CorruptRecord, match="99"):
        records.from_bytes(bytes(data))


@pytest.mark.parametrize("fields", [
    [], ["k"], ["k", "s", "7", 9, {}, b""], ["k", "s", 7, 9, [], b""], ["k", "s", 7, 9, {}, "b"],
    5])
def test_valid_checksums_do_not_excuse_wrong_fields(fields):
    payload = msgpack.packb(fields)
    header = records.to_bytes(record(1))[:5] + zlib.crc32(payload).to_bytes(4, "little")
    with pytest.raises(CorruptRecord):
        records.from_bytes(header + payload)


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(UserError, match="Unicode"):
        records.to_bytes(Record("k", "s", 1, 1, {"prompt": "\udc80"}, b""))
