"""Our stacked parameters, put together from PyTorch tensors one leaf at a time."""

from collections.abc import Callable, Mapping

import numpy as np

from tools.convert_torch_weights.mappings.engine import Entry, Table
from tools.convert_torch_weights.readers import LazyTensor


def entries_by_leaf(table: Table) -> dict[str, list[Entry]]:
    """Parameter path -> its PyTorch tensors, in the order of the stack."""
    groups: dict[str, list[Entry]] = {}
    for entry in table.entries.values():
        groups.setdefault(entry.path, []).append(entry)
    return groups


def assembled_leaves(table: Table, tensors: Mapping[str, LazyTensor], dtype: np.dtype,
                     not_finite: list[str]) -> dict[str, LazyTensor]:
    """The leaves whose tensors are all in `tensors`, cast to `dtype` (round to nearest even).

    Args:
      not_finite: takes the keys whose values are nan or infinite, as the leaves are read.
    """
    return {path: LazyTensor(path, dtype, tuple(table.leaves[path].shape),
                           _assembler(table, path, entries, tensors, dtype, not_finite))
            for path, entries in entries_by_leaf(table).items()
            if all(entry.key in tensors for entry in entries)}


def _assembler(table, path, entries, tensors, dtype, not_finite) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        leaf = np.empty(table.leaves[path].shape, dtype)
        for entry in entries:
            with np.errstate(over="ignore"):  # told below, by key
                entry.place(leaf, tensors[entry.key].read())
            if not np.isfinite(leaf[... if entry.index is None else entry.index]).all():
                not_finite.append(entry.key)
        return leaf

    return read
