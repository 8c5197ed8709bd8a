"""Turns a list of rules into a table of every tensor, and applies it in both directions."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from pid_jax.errors import UserError
from tools.convert_torch_weights.mappings.transforms import (CONV, IDENTITY, POINTWISE, Transform,
                                                             linear, vector)

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclasses.dataclass(frozen=True)
class Rule:
    """PyTorch key <-> parameter path, with `{i}`-style numbers in both.

    A number that only the key has counts the entries of the leaf's leading axis (stacked blocks).
    """

    key: str
    path: str
    transform: Transform = IDENTITY


@dataclasses.dataclass(frozen=True)
class Entry:
    """One PyTorch tensor: where it lives in ours and how its layout changes."""

    key: str
    shape: tuple[int, ...]  # in PyTorch
    path: str  # "patch_blocks/attn/qkv_x/kernel"
    index: int | None  # on the leaf's leading axis; None: the whole leaf
    transform: Transform

    def place(self, leaf: np.ndarray, tensor: np.ndarray) -> None:
        """Writes the PyTorch tensor into its place in `leaf`."""
        leaf[... if self.index is None else self.index] = self.transform.to_jax(tensor)

    def pick(self, leaf: Any) -> Any:
        """The PyTorch tensor that `leaf` (numpy or jax) holds for this entry."""
        return self.transform.to_torch(leaf if self.index is None else leaf[self.index])


@dataclasses.dataclass(frozen=True)
class Table:
    """Every tensor of one network: entries by PyTorch key, our leaves' shapes by path.

    `constants` are tensors that PyTorch stores and this project computes, by key.
    """

    model: str
    entries: Mapping[str, Entry]
    leaves: Mapping[str, jax.ShapeDtypeStruct]
    constants: Mapping[str, Callable[[], np.ndarray]] = dataclasses.field(default_factory=dict)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """PyTorch key -> shape."""
        return {key: entry.shape for key, entry in self.entries.items()}


def layer(key: str, path: str, rows: np.ndarray | None = None,
          columns: np.ndarray | None = None, parts: int = 0) -> list[Rule]:
    """Rules of a linear layer's weight and bias (see `transforms.linear`)."""
    return [Rule(f"{key}.weight", f"{path}/kernel", linear(rows, columns, parts)),
            Rule(f"{key}.bias", f"{path}/bias", vector(rows, parts))]


def convolution(key: str, path: str) -> list[Rule]:
    """Rules of a convolution's weight and bias."""
    return [Rule(f"{key}.weight", f"{path}/kernel", CONV), Rule(f"{key}.bias", f"{path}/bias")]


def pointwise(key: str, path: str) -> list[Rule]:
    """Rules of a 1 x 1 convolution that is a linear layer here."""
    return [Rule(f"{key}.weight", f"{path}/kernel", POINTWISE), Rule(f"{key}.bias", f"{path}/bias")]


def affine(key: str, path: str) -> list[Rule]:
    """Rules of a group or layer norm."""
    return [Rule(f"{key}.weight", f"{path}/scale"), Rule(f"{key}.bias", f"{path}/bias")]


def make_table(model: str, rules: list[Rule], params: Mapping[str, Any],
               constants: Mapping[str, Callable[[], np.ndarray]] | None = None) -> Table:
    """Expands rules over the (abstract) parameters; every leaf must match exactly one rule."""
    leaves = dict(flatten(params))
    entries = {}
    for path, leaf in leaves.items():
        rule, numbers = _rule_for(rules, path)
        for entry in _entries(rule, numbers, path, leaf):
            entries[entry.key] = entry
    return Table(model, entries, leaves, constants or {})


def _rule_for(rules: list[Rule], path: str) -> tuple[Rule, dict[str, str]]:
    matches = [(rule, match.groupdict()) for rule in rules
               if (match := re.fullmatch(_PLACEHOLDER.sub(r"(?P<\1>\\d+)", rule.path), path))]
    if len(matches) != 1:
        raise LookupError(f"parameter {path} matches {len(matches)} rules of its table, not one")
    return matches[0]


def _entries(rule: Rule, numbers: dict[str, str], path: str, leaf: Any) -> Iterator[Entry]:
    stacked = [name for name in _PLACEHOLDER.findall(rule.key) if name not in numbers]
    if not stacked:
        shape = jax.eval_shape(rule.transform.to_torch, leaf).shape
        yield Entry(rule.key.format(**numbers), shape, path, None, rule.transform)
        return
    shape = jax.eval_shape(lambda whole: rule.transform.to_torch(whole[0]), leaf).shape
    for index in range(leaf.shape[0]):
        key = rule.key.format(**numbers, **{stacked[0]: index})
        yield Entry(key, shape, path, index, rule.transform)


def torch_to_jax(table: Table, tensors: Mapping[str, np.ndarray]) -> dict:
    """A state dict -> nested parameters, dtypes kept.

    Raises UserError with the full list of missing, extra and wrongly shaped tensors.
    """
    check_shapes(table, {key: tuple(tensor.shape) for key, tensor in tensors.items()})
    leaves: dict[str, np.ndarray] = {}
    for key, entry in table.entries.items():
        shape = table.leaves[entry.path].shape
        leaf = leaves.setdefault(entry.path, np.empty(shape, tensors[key].dtype))
        entry.place(leaf, tensors[key])
    return unflatten(leaves)


def jax_to_torch(table: Table, params: Mapping[str, Any]) -> dict[str, Any]:
    """Nested parameters (or gradients, or their shapes) -> a state dict, dtypes kept.

    Raises UserError with the full list of parameters that the table does not expect.
    """
    leaves = dict(flatten(params))
    _raise_for(f"parameters that are not those of {table.model}",
               _differences({path: leaf.shape for path, leaf in table.leaves.items()},
                            {path: leaf.shape for path, leaf in leaves.items()}))
    return {key: _pick(entry, leaves[entry.path]) for key, entry in table.entries.items()}


def _pick(entry: Entry, leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(entry.shape, leaf.dtype)
    return entry.pick(leaf)


def check_shapes(table: Table, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UserError unless a state dict has exactly the table's keys and shapes."""
    _raise_for(f"weights that are not those of {table.model}",
               _differences(table.shapes(), shapes))


def _differences(expected: Mapping[str, tuple], found: Mapping[str, tuple]) -> list[str]:
    missing = [f"{name} is missing" for name in expected if name not in found]
    extra = [f"{name} is not known" for name in found if name not in expected]
    wrong = [f"{name} has shape {tuple(found[name])}, expected {tuple(shape)}"
             for name, shape in expected.items()
             if name in found and tuple(found[name]) != tuple(shape)]
    return missing + extra + wrong


def _raise_for(what: str, differences: list[str]) -> None:
    if differences:
        raise UserError(f"{what}: {'; '.join(differences)}")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path with slashes, leaf) of a nested dict."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{path}/")
        else:
            yield path, value


def unflatten(leaves: Mapping[str, Any]) -> dict:
    """Inverse of `flatten`."""
    tree: dict = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree
