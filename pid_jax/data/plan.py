"""Which records make up which batch: a pure function of (index, layout, seed, step).

An epoch shows every record once. Each bucket's records are shuffled and cut into batches of one
size, then the batches of all buckets are shuffled. What a batch holds does not depend on how many
processes or workers read it; a process takes its rows of the global batch.

Where sources have weights, an epoch shows as many pictures as there are, of each bucket and source
so many that the sources have their shares; a source goes through all its pictures of a bucket, over
as many epochs as that takes, before it shows one again.
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
      turn: 0, or another number each time that the record is shown again in this epoch.
    """

    record: int
    bucket: Bucket
    epoch: int
    turn: int


@dataclasses.dataclass(frozen=True)
class Shares:
    """How sources are mixed.

    Attributes:
      source: int [N], number of each record's source.
      weights: of each source; the shares of the samples are in proportion.
    """

    source: np.ndarray
    weights: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class _Part:
    """Records of one source in one bucket, and how many of them an epoch shows."""

    members: np.ndarray
    count: int


class Plan:
    """The order of all batches.

    Attributes:
      buckets: those that get batches, in layout order.
      members: records of each of them, int64 arrays.
      dropped: how many records are too small for every bucket, or in buckets without batches.
      steps_per_epoch: batches of one epoch; the same for every epoch.
    """

    def __init__(self, index: Index, layout: Layout, batch_size: int, seed: int = 0,
                 shuffle: bool = True, remainder: str = "repeat",
                 shares: Shares | None = None):
        """Args:
          index: widths and heights of all records.
          layout: the buckets.
          batch_size: global rows of a batch.
          seed: orders records and batches, with the epoch.
          shuffle: off keeps records in the data set's order and buckets one after another.
          remainder: what becomes of a bucket's records that do not fill a last batch: "repeat"
            fills it up with the epoch's first records of that bucket, "drop" leaves them out
            (others in each epoch).
          shares: of the sources in the samples; None: an epoch shows every record once.
        Raises: UserError when no batch can be made, or an argument is out of range.
        """
        if batch_size < 1:
            raise UserError(f"the batch size is {batch_size}; it must be at least 1")
        if remainder not in REMAINDERS:
            raise UserError(f"remainder is {remainder!r}; choose one of {', '.join(REMAINDERS)}")
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        groups = _group(index, layout)
        parts = _parts(groups, shares)
        sizes = [sum(p.count for p in group) for group in parts]
        counts = [-(-size // batch_size) if remainder == "repeat" else size // batch_size
                  for size in sizes]
        used = [i for i, count in enumerate(counts) if count]
        if not used:
            raise _no_batch(index, layout, batch_size)
        self.buckets = tuple(layout.buckets[i] for i in used)
        self.members = tuple(groups[i] for i in used)
        self.dropped = len(index) - sum(map(len, self.members))
        self._parts = [parts[i] for i in used]
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
        shown = epoch.groups[group]
        fill, place = divmod(first * self.batch_size + row, len(shown.records))
        turn = int(shown.turns[place]) + fill * shown.most_turns
        return Slot(int(shown.records[place]), self.buckets[group], number, turn)

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
        groups = [self._draw_group(g, number) for g in range(len(self._parts))]
        return _Epoch(self._order(self.steps_per_epoch, Purpose.BATCH_ORDER, number), groups)

    def _draw_group(self, g: int, number: int) -> "_Shown":
        """What an epoch shows of one bucket."""
        drawn = [self._draw_part(g, s, number) for s in range(len(self._parts[g]))]
        records, turns = (np.concatenate(column) for column in zip(*drawn))
        order = self._order(len(records), Purpose.RECORD_ORDER, number, g)
        return _Shown(records[order], turns[order], int(turns.max()) + 1)

    def _draw_part(self, g: int, s: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Records of source `s` and their turns: the next `count` of an endless sequence that goes
        through the members again and again, in another order each time."""
        part = self._parts[g][s]
        size = len(part.members)
        if part.count == size:
            return part.members, np.zeros(size, np.int32)
        rounds, places = np.divmod(number * part.count + np.arange(part.count), size)
        records = np.empty(part.count, np.int64)
        for turn in range(int(rounds[0]), int(rounds[-1]) + 1):
            order = self._order(size, Purpose.SOURCE_ORDER, turn, g, s)
            records[rounds == turn] = part.members[order[places[rounds == turn]]]
        return records, (rounds - rounds[0]).astype(np.int32)

    def _order(self, count: int, purpose: Purpose, *words: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(count)
        return randomness.permutation(count, purpose, self.seed, *words)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_lock": None, "_epochs": {}}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class _Shown:
    records: np.ndarray
    turns: np.ndarray
    most_turns: int


@dataclasses.dataclass(frozen=True)
class _Epoch:
    batches: np.ndarray
    groups: Sequence[_Shown]


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


def _parts(groups: Sequence[np.ndarray], shares: Shares | None) -> list[list[_Part]]:
    """The records of each bucket by source, with their number in an epoch."""
    if shares is None:
        return [[_Part(group, len(group))] for group in groups]
    rates = _rates(groups, shares)
    result = []
    for group in groups:
        source = shares.source[group]
        members = [group[source == s] for s in range(len(rates))]
        result.append([_Part(m, max(1, round(rate * len(m))))
                       for m, rate in zip(members, rates) if len(m)])
    return result


def _rates(groups: Sequence[np.ndarray], shares: Shares) -> np.ndarray:
    """How often an epoch shows a picture of each source, on average."""
    present = np.bincount(shares.source[np.concatenate(groups)], minlength=len(shares.weights))
    weights = np.where(present > 0, shares.weights, 0.0)
    return weights / max(weights.sum(), 1e-300) * present.sum() / np.maximum(present, 1)


def _no_batch(index: Index, layout: Layout, batch_size: int) -> UserError:
    smallest = min(layout.buckets, key=lambda b: b.width * b.height)
    return UserError(
        f"none of the {len(index)} pictures can fill a batch: either all are smaller than the "
        f"smallest bucket ({smallest.width} x {smallest.height}), or no bucket has {batch_size} "
        "pictures and remainder is 'drop'; lower the image size or the batch size")
