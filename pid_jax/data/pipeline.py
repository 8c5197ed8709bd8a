"""The stream of training batches: Grain runs the plan with threads, workers and prefetch.

    with build_pipeline("photos/train", batch_size=8, image_size=128) as batches:
        batch = next(batches)

A stream's whole state is the number of the next step. It can be set to any step, goes on exactly
there, and gives the same batches for every number of threads and workers.
"""

import dataclasses
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from pid_jax import images, registry
from pid_jax.data import captions
from pid_jax.data.buckets import Bucket, Fewer, Layout, build_layout
from pid_jax.data.dataset import Dataset
from pid_jax.data.index import Index
from pid_jax.data.loading import Augmentation, SampleLoader
from pid_jax.data.plan import Plan, Shares, Slot, process_rows
from pid_jax.data.sources import Mixture, open_data, source_numbers, source_table
from pid_jax.data.stored_latents import StoredLatents
from pid_jax.errors import UserError

_ENDLESS = 1 << 48
# Bytes from which an array comes from a worker through shared memory instead of a pipe.
_SHARED_MEMORY_FROM = 1 << 20
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Options:
    """Everything that a stream of batches depends on; see `Plan` and `Augmentation` for the rest.

    Attributes:
      path: folder of a packed data set, or a registry of sources (see `sources`).
      sources: which of a registry's; none: all.
      batch_size: rows of a global batch.
      image_size, buckets, sizes: see `buckets.build_layout`.
      max_buckets: most compiled sizes (see `buckets.Fewer`); 0: all of the layout.
      latents: folder of `python -m pid_jax.embed_latents`, for data options with which a picture is
        always the same; "": none.
      threads: reading threads (of each worker); 0 reads when a batch is asked for.
      workers: worker processes; 0 reads in this one.
      prefetch: batches held ready (by each worker).
      process, processes: which even share of every global batch this stream yields.
    """

    path: str
    batch_size: int
    seed: int = 0
    image_size: int = 1024
    buckets: str = "square"
    sizes: tuple[str, ...] = ()
    max_buckets: int = 0
    sources: tuple[str, ...] = ()
    shuffle: bool = True
    remainder: str = "repeat"
    crop: str = "center"
    resize: str = "fit"
    decode: str = "exact"
    flip: bool = False
    permute_colours: bool = False
    caption_fields: tuple[str, ...] = captions.PROMPT_FIELDS
    caption_dropout: float = 0.0
    latents: str = ""
    strict: bool = False
    threads: int = 2
    workers: int = 0
    prefetch: int = 2
    process: int = 0
    processes: int = 1

    def __post_init__(self):
        for name, least in (("threads", 0), ("workers", 0), ("prefetch", 0), ("max_buckets", 0),
                            ("processes", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; expected at least {least}")


def build_pipeline(path: str, batch_size: int, **options: Any) -> "Batches":
    """Opens a data set as an endless stream of batches, from step 0.

    Args: those of `Options`. Raises: UserError for unknown or impossible ones.
    """
    known = [field.name for field in dataclasses.fields(Options)]
    for name in options:
        if name not in known:
            raise registry.unknown("data option", name, known)
    return Batches(Options(path, batch_size, **options))


class Batches(Iterator[dict]):
    """An endless iterator of batches, a context manager that ends its threads and workers.

    A batch is a dict of this process's B rows, all of one bucket (H, W):
      image: float32 [B, H, W, 3] in [-1, 1]
      caption, key, source: list[str] of length B
      width, height: int32 [B], native size in pixels
      record: int64 [B], numbers of the records in the data set
      latent: float32 [B, h, w, C], where `latents` are read
      sigma_range: float32 [B, 2], where sources register noise levels; nan for those that do not

    Attributes:
      step: the step of the next batch.
      steps_per_epoch: batches in which every record is seen once.
      buckets: the sizes that batches can have.
      skipped: key -> reason of every unreadable record met so far; each was replaced by another of
        its bucket.
      loader: reads a slot of the plan.
      latents: those that are read instead of encoding pictures, or None.
      origin: see `picture_origin`.
    """

    def __init__(self, options: Options):
        self.options = options
        dataset = open_data(options.path, options.sources)
        _check_captions(dataset, options)
        if not dataset.manifest["complete"]:
            _log.warning("%s is incomplete: packing it was interrupted", dataset.folder)
        layout = _layout(options, dataset.index)
        _check_memory(options, layout)
        shares = _shares(dataset)
        self.plan = Plan(dataset.index, layout, options.batch_size, options.seed,
                         options.shuffle, options.remainder, shares)
        self._weights = shares and ",".join(map(str, shares.weights))
        if self.plan.dropped:
            _log.warning("%d of %d pictures are never shown: too small for their bucket, or in a "
                         "bucket that cannot fill a batch", self.plan.dropped, len(dataset))
        self.skipped: dict[str, str] = {}
        self.step = 0
        self._dataset = dataset
        self._rows = process_rows(options.batch_size, options.process, options.processes)
        self.latents = _open_latents(dataset, layout, options)
        self.loader = SampleLoader(dataset, self.plan, _augmentation(options, layout.min_scale),
                                   self.latents)
        self.origin = picture_origin(dataset, layout, options)
        self._iterator: grain.DatasetIterator | None = None
        self._first_step = 0

    @property
    def reader(self) -> str:
        """Who read the last batch: workers take turns."""
        if not self.options.workers:
            return f"the {self.options.threads} data threads"
        worker = (self.step - 1 - self._first_step) % self.options.workers
        return f"data worker {worker} of {self.options.workers}"

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch

    @property
    def records(self) -> int:
        """Records of the data set, those that no bucket takes among them."""
        return len(self._dataset)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.plan.buckets

    def __next__(self) -> dict[str, Any]:
        if self._iterator is None:
            self._iterator, self._first_step = iter(self._grain_dataset()), self.step
        batch = next(self._iterator)
        self._note_skipped(batch.pop("skipped"))
        self.step += 1
        return {"image": images.to_float(batch.pop("pixels"))} | batch

    @property
    def global_keys(self) -> list[str]:
        """Keys of the last batch as planned, its rows in other processes included."""
        return [self._dataset.index.key[slot.record] for slot in self.plan.batch(self.step - 1)]

    def get_state(self) -> dict[str, Any]:
        """JSON-able: the next step, and what must be the same for it to mean the same batch."""
        return {"step": self.step, "order": self._order()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on at `state["step"]`, backwards too.

        Raises: UserError when the state is of another data set or another order of batches.
        """
        theirs, ours = state.get("order"), self._order()
        if not isinstance(theirs, dict) or not isinstance(state.get("step"), int):
            raise UserError("the saved position in the data is damaged; start a new run from the "
                            "checkpoint's weights")
        changed = [k for k in ours if theirs.get(k) != ours[k]]
        if changed:
            what = "; ".join(f"{k} was {theirs.get(k)!r}, now {ours[k]!r}" for k in changed)
            raise UserError(f"the saved position in the data does not fit: {what}; restore these "
                            "settings, or start a new run from the checkpoint's weights")
        self.close()
        self.step = state["step"]

    def close(self) -> None:
        """Ends worker processes, and threads once their batch is read. `next` starts new ones."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _order(self) -> dict[str, Any]:
        """What the sequence of global batches depends on."""
        options = self.options
        return {"fingerprint": self._dataset.fingerprint, "batch_size": options.batch_size,
                "seed": options.seed, "shuffle": options.shuffle, "remainder": options.remainder,
                "buckets": ",".join(f"{b.width}x{b.height}" for b in self.buckets),
                "weights": self._weights}

    def _grain_dataset(self) -> grain.IterDataset:
        options = self.options
        rows = range(options.batch_size)[self._rows]
        slots = _SlotSource(self.plan, rows, self.step)
        dataset = grain.MapDataset.source(slots).map(self.loader)
        buffer = max(options.prefetch, options.threads) if options.threads else 0
        dataset = dataset.batch(len(rows), batch_fn=_collate).to_iter_dataset(
            grain.ReadOptions(options.threads, buffer))
        if not options.workers:
            return dataset
        _parse_absl_flags()
        sharing = grain.experimental.DatasetOptions(min_shm_size=_SHARED_MEMORY_FROM)
        return grain.experimental.WithOptionsIterDataset(dataset, sharing).mp_prefetch(
            grain.MultiprocessingOptions(options.workers, max(1, options.prefetch)),
            worker_init_fn=_end_with_parent)

    def _note_skipped(self, skipped: Sequence[tuple[str, str]]) -> None:
        for key, reason in skipped:
            if key not in self.skipped:
                _log.warning("picture %r is replaced by another: %s", key, reason)
            self.skipped[key] = reason


class _SlotSource:
    """The slots of this process's rows, one after another, from a first step on."""

    def __init__(self, plan: Plan, rows: range, first_step: int):
        self._plan, self._rows, self._first_step = plan, rows, first_step

    def __len__(self) -> int:
        return _ENDLESS * len(self._rows)

    def __getitem__(self, i: int) -> Slot:
        step, row = divmod(i, len(self._rows))
        return self._plan.slot(self._first_step + step, self._rows[row])


def _collate(samples: Sequence[dict]) -> dict:
    batch = {name: [s[name] for s in samples] for name in samples[0]}
    numbers = {"width": np.int32, "height": np.int32, "record": np.int64}
    batch |= {name: np.array(batch[name], dtype) for name, dtype in numbers.items()}
    if "latent" in batch:
        batch["latent"] = np.stack(batch["latent"])
    ranges = batch.pop("sigma_range")
    if any(ranges):
        batch["sigma_range"] = np.array([r or (np.nan, np.nan) for r in ranges], np.float32)
    return batch | {"pixels": np.stack(batch["pixels"]), "skipped": sum(batch["skipped"], [])}


def _augmentation(options: Options, min_scale: float) -> Augmentation:
    names = {f.name for f in dataclasses.fields(Augmentation)} - {"min_scale"}
    return Augmentation(**{n: getattr(options, n) for n in names}, min_scale=min_scale)


def _layout(options: Options, index: Index) -> Layout:
    layout = build_layout(options.buckets, options.image_size, options.sizes)
    oblong = [bucket.name for bucket in layout.buckets if bucket.width != bucket.height]
    if options.resize == "adm" and oblong:
        raise UserError(f"resize 'adm' cuts squares, but the buckets have {oblong[0]}; set buckets to "
                        "square, or resize to fit")
    if not 0 < options.max_buckets < len(layout.buckets):
        return layout
    natives = zip(index.width.tolist(), index.height.tolist())
    return Fewer(layout, natives, options.max_buckets)


def picture_origin(dataset: Dataset | Mixture, layout: Layout, options: Options
                   ) -> dict[str, str]:
    """What the pixels of every picture depend on, where nothing is drawn at random."""
    return {"fingerprint": dataset.fingerprint, "resize": options.resize,
            "decode": options.decode, "layout": options.buckets,
            "buckets": ",".join(f"{b.width}x{b.height}" for b in layout.buckets)}


def check_fixed(options: Options) -> None:
    """Raises UserError for options that show a picture in more than one way."""
    for name, values in (("crop", ("center",)), ("resize", ("fit", "native", "adm")),
                         ("flip", (False,)), ("permute_colours", (False,))):
        if getattr(options, name) not in values:
            raise UserError(f"stored latents need pictures that are always the same, but {name} "
                            f"is {getattr(options, name)!r}; set it to {values[0]!r}")


def _open_latents(dataset: Dataset | Mixture, layout: Layout, options: Options
                  ) -> StoredLatents | None:
    if not options.latents:
        return None
    check_fixed(options)
    latents = StoredLatents(options.latents)
    latents.check(picture_origin(dataset, layout, options))
    return latents


def _shares(dataset: Dataset | Mixture) -> Shares | None:
    """The shares of a registry's sources, where it gives weights."""
    weights = [source.weight for source in source_table(dataset)]
    if not weights or None in weights:
        return None
    return Shares(source_numbers(dataset), tuple(weights))


def _check_captions(dataset: Dataset | Mixture, options: Options) -> None:
    parts = dataset.parts() if isinstance(dataset, Mixture) else [(None, dataset)]
    for source, part in parts:
        fields = (source and source.caption_fields) or options.caption_fields
        present = part.manifest["captions"]
        if present and not set(fields) & set(present):
            raise UserError(f"caption_fields is {fields}, but the captions in {part.folder} are "
                            f"named {', '.join(present)}")


def _check_memory(options: Options, layout: Layout) -> None:
    """Refuses a batch of which this process's part alone is larger than the host's memory."""
    pixels = max(bucket.width * bucket.height for bucket in layout.buckets)
    needed = pixels * 3 * 4 * (options.batch_size // options.processes)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise UserError(f"a batch of {options.batch_size} pictures of up to {pixels} pixels takes "
                        f"{needed / 2**30:.0f} GiB on this host, which has {memory / 2**30:.0f}; "
                        "choose a smaller batch_size or image_size")


def _parse_absl_flags() -> None:
    """Grain's workers read absl flags, which a program without absl's `app.run` never parses."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _end_with_parent(worker: int, workers: int) -> None:
    """Runs in a worker: it ends when its parent dies, even by SIGKILL, and ignores Ctrl-C, which
    the parent answers by closing it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
