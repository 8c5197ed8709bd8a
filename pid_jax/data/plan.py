"""Which records make up which batch: a pure function of (index, layout, seed, step).

An epoch shows every record once. Each bucket's records are shuffled and cut into batches of one
size, then the batches of all buckets are shuffled. What a batch holds does not depend on how many
processes or workers read it; a process takes its rows of the global batch.
"""

import dataclasses
import threading
from collections.abc import Sequence

import numpy as np

from pid_jax.data import randomness
from pid_jax.data.buckets import Bucket, Layout, assign
from pid_jax.data.index import Index
from pid_jax.data.randomness import Purpose
from pid_jax.errors import UserError

REMAINDERS = ("repeat", "drop")
_DROPPED = -1


@dataclasses.dataclass(frozen=True)
class Slot:
    """One row of one batch.

    Attributes:
      record: number of the record in the data set.
      bucket: the bucket it is shown in, the same for all rows of a batch.
      epoch: how many times the data set was shown before.
      turn: 0, or n when the record fills up a last batch for the n-th time in this epoch.
    """

    record: int
    bucket: Bucket
    epoch: int
    turn: int


class Plan:
    """The order of all batches.

    Attributes:
      buckets: those that get batches, in layout order.
      members: records of each of them, int64 arrays.
      dropped: how many records are too small for every bucket, or in buckets without batches.
      steps_per_epoch: batches of one epoch; the same for every epoch.
    """

    def __init__(self, index: Index, layout: Layout, batch_size: int, seed: int = 0,
                 shuffle: bool = True, remainder: str = "repeat"):
        """Args:
          index: widths and heights of all records.
          layout: the buckets.
          batch_size: global rows of a batch.
          seed: orders records and batches, with the epoch.
          shuffle: off keeps records in the data set's order and buckets one after another.
          remainder: what becomes of a bucket's records that do not fill a last batch: "repeat"
            fills it up with the epoch's first records of that bucket, "drop" leaves them out
            (others in each epoch).
        Raises: UserError when no batch can be made, or an argument is out of range.
        """
        if batch_size < 1:
            raise UserError(f"the batch size is {batch_size}; it must be at least 1")
        if remainder not in REMAINDERS:
            raise UserError(f"remainder is {remainder!r}; choose one of {', '.join(REMAINDERS)}")
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        groups = _group(index, layout)
        counts = [-(-len(m) // batch_size) if remainder == "repeat" else len(m) // batch_size
                  for m in groups]
        used = [i for i, count in enumerate(counts) if count]
        if not used:
            raise _no_batch(index, layout, batch_size)
        self.buckets = tuple(layout.buckets[i] for i in used)
        self.members = tuple(groups[i] for i in used)
        self.dropped = len(index) - sum(map(len, self.members))
        self._ends = np.cumsum([counts[i] for i in used])
        self.steps_per_epoch = int(self._ends[-1])
        self._epochs: dict[int, _Epoch] = {}
        self._lock = threading.Lock()

    def batch(self, step: int, rows: slice = slice(None)) -> list[Slot]:
        """Rows of the global batch of a step (counted from 0, any order of calls)."""
        return [self.slot(step, row) for row in range(self.batch_size)[rows]]

    def slot(self, step: int, row: int) -> Slot:
        """One row of the global batch of a step."""
        number, offset = divmod(step, self.steps_per_epoch)
        epoch = self._epoch(number)
        batch = int(epoch.batches[offset])
        group = int(np.searchsorted(self._ends, batch, side="right"))
        first = batch - (int(self._ends[group - 1]) if group else 0)
        turn, place = divmod(first * self.batch_size + row, len(self.members[group]))
        record = int(self.members[group][epoch.records[group][place]])
        return Slot(record, self.buckets[group], number, turn)

    def counts(self) -> dict[str, int]:
        """Records of each bucket that gets batches, by bucket name."""
        return {b.name: len(m) for b, m in zip(self.buckets, self.members)}

    def _epoch(self, number: int) -> "_Epoch":
        with self._lock:
            if number not in self._epochs:
                while len(self._epochs) > 1:
                    del self._epochs[next(iter(self._epochs))]  # the oldest drawn
                self._epochs[number] = self._draw_epoch(number)
            return self._epochs[number]

    def _draw_epoch(self, number: int) -> "_Epoch":
        sizes = [len(m) for m in self.members]
        if not self.shuffle:
            return _Epoch(np.arange(self.steps_per_epoch), [np.arange(s) for s in sizes])
        order = (self.seed, number)
        return _Epoch(
            randomness.permutation(self.steps_per_epoch, Purpose.BATCH_ORDER, *order),
            [randomness.permutation(s, Purpose.RECORD_ORDER, *order, g)
             for g, s in enumerate(sizes)])

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_lock": None, "_epochs": {}}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class _Epoch:
    batches: np.ndarray
    records: Sequence[np.ndarray]


def process_rows(batch_size: int, process: int, processes: int) -> slice:
    """The rows of the global batch that process number `process` reads.

    Raises: UserError when the batch cannot be split evenly.
    """
    if not 0 <= process < processes:
        raise UserError(f"process {process} of {processes} does not exist")
    if batch_size % processes:
        raise UserError(f"a batch of {batch_size} cannot be split over {processes} processes; "
                        f"choose a multiple of {processes}")
    share = batch_size // processes
    return slice(process * share, (process + 1) * share)


def _group(index: Index, layout: Layout) -> list[np.ndarray]:
    """Record numbers of each bucket of the layout."""
    number = {b: i for i, b in enumerate(layout.buckets)} | {None: _DROPPED}
    sizes = np.stack([index.width, index.height], axis=1)
    distinct, inverse = np.unique(sizes, axis=0, return_inverse=True)
    chosen = np.array([number[assign(layout, (int(w), int(h)))] for w, h in distinct])
    bucket_of = chosen[inverse.reshape(-1)]
    return [np.flatnonzero(bucket_of == i) for i in range(len(layout.buckets))]


def _no_batch(index: Index, layout: Layout, batch_size: int) -> UserError:
    smallest = min(layout.buckets, key=lambda b: b.width * b.height)
    return UserError(
        f"none of the {len(index)} pictures can fill a batch: either all are smaller than the "
        f"smallest bucket ({smallest.width} x {smallest.height}), or no bucket has {batch_size} "
        "pictures and remainder is 'drop'; lower the image size or the batch size")
