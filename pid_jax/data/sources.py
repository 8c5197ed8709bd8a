"""Named sources of pictures, registered in one JSON file, and their mixture as one data set.

    {"photos": {"path": "packed/photos", "weight": 3, "sigma_range": [0.0, 0.8]},
     "posters": {"path": "packed/posters", "weight": 1, "caption_fields": ["prompt"],
                 "format": "arrayrecord"}}

Paths are relative to the file. `config.data.path` may be such a file instead of a packed folder.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pid_jax import registry
from pid_jax.data import index as index_lib
from pid_jax.data.dataset import Dataset
from pid_jax.data.records import Record
from pid_jax.errors import UserError

FORMATS = ("arrayrecord",)


@dataclasses.dataclass(frozen=True)
class Source:
    """An entry of the registry.

    Attributes:
      name: what a batch's `source` says.
      path: the packed folder.
      weight: share of the samples, in relation to the others'; None (for all): as many as the
        source has pictures.
      caption_fields: names of captions to choose among; None: the run's.
      sigma_range: (lowest, highest) noise level of latents in training; None: the run's.
    """

    name: str
    path: Path
    weight: float | None = None
    caption_fields: tuple[str, ...] | None = None
    sigma_range: tuple[float, float] | None = None


def open_data(path: str | os.PathLike, names: Sequence[str] = ()) -> "Dataset | Mixture":
    """The data set in a packed folder, or the mixture of the sources that a registry lists.

    Args:
      path: a packed folder or a .json file.
      names: which sources of the registry; none: all of them.
    Raises: UserError when there is none, it is damaged, or names a source that does not exist.
    """
    if Path(path).suffix == ".json":
        return Mixture(Path(path), read_registry(Path(path), names))
    if names:
        raise UserError(f"sources are {tuple(names)}, but {path} is no registry of sources; name "
                        "a .json file")
    return Dataset(path)


def read_registry(path: Path, names: Sequence[str] = ()) -> tuple[Source, ...]:
    """The sources of a registry, in its order. Raises UserError; see `open_data`."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the registry {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the registry {path} is not JSON: {error}") from error
    if not isinstance(entries, Mapping) or not entries:
        raise UserError(f"the registry {path} must be a JSON object: name -> options of a source")
    for name in names:
        if name not in entries:
            raise registry.unknown(f"source of {path}", name, entries)
    sources = tuple(_source(path, name, options) for name, options in entries.items()
                    if not names or name in names)
    if len({source.weight is None for source in sources}) > 1:
        raise UserError(f"in {path} some sources have a weight and some have none; give it to all "
                        "or to none")
    return sources


def _source(path: Path, name: str, options: Any) -> Source:
    """One entry, checked."""
    where = f"source {name!r} of {path}"
    if not isinstance(options, Mapping) or not isinstance(options.get("path"), str):
        raise UserError(f"{where} is {options!r}; expected an object with a path")
    known = [field.name for field in dataclasses.fields(Source)][1:] + ["format"]
    for option in options:
        if option not in known:
            raise registry.unknown(f"option of {where}", option, known)
    if options.get("format", FORMATS[0]) not in FORMATS:
        raise UserError(f"{where} has format {options['format']!r}; expected {', '.join(FORMATS)}: "
                        "pack other collections with `python -m pid_jax.data.ingest`")
    return Source(name, path.parent / options["path"], _weight(options.get("weight"), where),
                  _fields(options.get("caption_fields"), where),
                  _sigma_range(options.get("sigma_range"), where))


def _weight(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if not _is_number(value) or not 0 < value < math.inf:
        raise UserError(f"the weight of {where} is {value!r}; expected a number above 0")
    return float(value)


def _fields(value: Any, where: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise UserError(f"caption_fields of {where} is {value!r}; expected a list of names")
    return tuple(value)


def _sigma_range(value: Any, where: str) -> tuple[float, float] | None:
    if value is None:
        return None
    if (not isinstance(value, list) or len(value) != 2 or not all(map(_is_number, value))
            or not 0 <= value[0] <= value[1] <= 1):
        raise UserError(f"sigma_range of {where} is {value!r}; expected [lowest, highest] with "
                        "0 <= lowest <= highest <= 1")
    return float(value[0]), float(value[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Mixture:
    """Several data sets one after another, read like one; a record's source is its entry's name.

    Attributes:
      folder: the registry file.
      sources: its entries, one for each data set.
      index: columns over all records.
      starts: number of each source's first record.
    """

    def __init__(self, path: Path, sources: Sequence[Source]):
        """Raises UserError when one of them is no data set."""
        self.folder, self.sources = path, tuple(sources)
        self._parts = [Dataset(source.path) for source in sources]
        self.index = index_lib.concatenate([part.index for part in self._parts])
        self.starts = list(itertools.accumulate(map(len, self._parts[:-1]), initial=0))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> Record:
        """Record i; see `Dataset`."""
        if not 0 <= i < len(self):
            raise IndexError(f"record {i} of {len(self)}")
        part = bisect.bisect_right(self.starts, i) - 1
        record = self._parts[part][i - self.starts[part]]
        return dataclasses.replace(record, source=self.sources[part].name)

    def captions(self) -> Iterator[Mapping[str, str]]:
        """As of `Dataset`."""
        for part in self._parts:
            yield from part.captions()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies the records and their order, by names of sources."""
        sha = hashlib.sha256()
        for source, part in zip(self.sources, self._parts):
            sha.update(f"{source.name}\0{part.fingerprint}\0".encode())
        return sha.hexdigest()

    @property
    def manifest(self) -> dict[str, Any]:
        """Totals over the sources."""
        parts = [part.manifest for part in self._parts]
        captions: dict[str, int] = {}
        for part in parts:
            for name, count in part["captions"].items():
                captions[name] = captions.get(name, 0) + count
        return {"complete": all(part["complete"] for part in parts), "captions": captions,
                "sources": {s.name: len(p) for s, p in zip(self.sources, self._parts)}}

    def parts(self) -> Iterable[tuple[Source, Dataset]]:
        """Each source with its data set."""
        return zip(self.sources, self._parts)


def source_table(data: "Dataset | Mixture") -> tuple[Source, ...]:
    """The registered sources; none for a plain data set."""
    return data.sources if isinstance(data, Mixture) else ()


def source_numbers(data: "Dataset | Mixture") -> np.ndarray | None:
    """int64 [N], which source each record is of; None for a plain data set."""
    if not isinstance(data, Mixture):
        return None
    return np.searchsorted(data.starts, np.arange(len(data)), side="right") - 1
