"""Random access to records in ArrayRecord files, from many threads and in many processes."""

import collections
import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from array_record.python.array_record_module import ArrayRecordReader

from pid_jax.data.records import CorruptRecord
from pid_jax.errors import UserError, one_line

# One record a group: random access reads nothing but the record. Pictures do not compress further.
WRITER_OPTIONS = "group_size:1,uncompressed"
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
OPEN_READERS = 64


class ShardFiles:
    """Files with few open at a time; may be sent to workers.

    Attributes:
      files: their paths.
    """

    def __init__(self, files: Sequence[Path]):
        """Opens nothing yet."""
        self.files = list(files)
        self._close_all()

    def read(self, number: int, position: int) -> bytes:
        """A record of file `number`. Raises CorruptRecord when it cannot be read."""
        try:
            return self.reader(number).read([position])[0]
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            raise CorruptRecord(one_line(error)) from error

    def reader(self, number: int) -> ArrayRecordReader:
        """The reader of file `number`; the one that was not used for longest makes room for it."""
        with self._lock:
            if number not in self._readers:
                if len(self._readers) >= OPEN_READERS:
                    self._readers.popitem(last=False)
                self._readers[number] = ArrayRecordReader(str(self.files[number]), _READER_OPTIONS)
            self._readers.move_to_end(number)
            return self._readers[number]

    def _close_all(self) -> None:
        self._lock = threading.Lock()
        self._readers: collections.OrderedDict[int, ArrayRecordReader] = collections.OrderedDict()

    def __getstate__(self) -> dict:
        return {"files": self.files}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["files"])


@contextlib.contextmanager
def write_errors(file: Path) -> Iterator[None]:
    """What the ArrayRecord library raises while `file` is written, as a UserError."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(f"cannot write {file}: {one_line(error)}") from error
