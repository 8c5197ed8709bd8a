"""What the converter knows of a network: its table, and how its weights are recognised.

Each table file ends with one `Network`; `mappings.NETWORKS` lists them.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from pid_jax.models import build_model
from tools.convert_torch_weights import licences
from tools.convert_torch_weights.mappings.engine import Rule

MAX_BLOCKS = 256
Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Recognised:
    """What a set of weights is.

    Attributes:
      model: name of a `Network`, or None.
      options: options that the shapes determine.
      reasons: one line for each conclusion.
    """

    model: str | None
    options: Mapping[str, object]
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """`option` is `value(shape of key)`, explained by `words`."""

    option: str
    key: str
    value: Callable[[tuple[int, ...]], object]
    words: str


def rows(shape: tuple[int, ...]) -> int:
    """For `Row.value`: the first axis of a PyTorch matrix, its outputs."""
    return shape[0]


def columns(shape: tuple[int, ...]) -> int:
    """For `Row.value`: the second axis of a PyTorch matrix, its inputs."""
    return shape[1]


class Findings:
    """Collects options with their reasons; a row whose key is absent or odd is left out."""

    def __init__(self, shapes: Shapes, reasons: list[str]):
        self.shapes, self.reasons, self.options = shapes, reasons, {}

    def add(self, option: str, value: object, reason: str) -> None:
        self.options[option] = value
        self.reasons.append(f"{option} {value}: {reason}")

    def read(self, table: tuple[Row, ...]) -> None:
        for row in table:
            shape = self.shapes.get(row.key, ())
            if len(shape) > 1:
                self.add(row.option, row.value(shape), f"{row.words} of {row.key} {list(shape)}")

    def count(self, pattern: str) -> int:
        """How many different numbers stand for `{i}` in the names that start like `pattern`.

        At most MAX_BLOCKS, so that a forged file cannot have an endless network built.
        """
        head = re.compile(re.escape(pattern).replace(r"\{i\}", r"(\d+)"))
        numbers = {match[1] for name in self.shapes if (match := head.match(name))}
        return min(len(numbers), MAX_BLOCKS)

    def add_count(self, option: str, pattern: str) -> None:
        self.add(option, self.count(pattern), f"number of {pattern}")

    def add_presence(self, option: str, key: str) -> None:
        there = key in self.shapes
        self.add(option, there, f"{key} is {'there' if there else 'not there'}")

    def heads(self, option: str, width: str, norm_key: str) -> None:
        """The head width is the length of the q norm."""
        shape = self.shapes.get(norm_key, ())
        if len(shape) == 1 and shape[0] and width in self.options:
            self.add(option, self.options[width] // shape[0],
                     f"{width} {self.options[width]} / {norm_key} {list(shape)}")


def _nothing(*arguments) -> None:
    """For networks that need no such step."""


@dataclasses.dataclass(frozen=True)
class Network:
    """One network.

    Attributes:
      name: as `--model` names it.
      title: what its weights are, in words, or a function (recognised, shapes) -> words.
      signature: a PyTorch key that no network listed after it in `NETWORKS` has.
      rules: network -> its table's rules; None: recognised only, there is no table.
      derive: adds the options that shapes determine.
      undetermined: options that no shape can tell.
      released: (recognised, shapes) -> values of `undetermined` in the released networks of this
        structure; empty for others.
      families: (recognised, shapes) -> latent families that it decodes; None: it decodes none.
      version: (recognised, shapes) -> name of the release.
      complete: fills in options of the model's config that follow from others and from shapes.
      objective: of configs that train it; None: it is not trained alone.
      licence: note on the weights, for the card.
      build: (name, **options) -> the Flax module; it has a method `all_parameters`.
      constants: network -> tensors that PyTorch stores and this project computes, by key.
    """

    name: str
    title: str | Callable[[Recognised, Shapes], str]
    signature: str
    rules: Callable[[Any], list[Rule]] | None = None
    derive: Callable[[Findings], None] = _nothing
    undetermined: tuple[str, ...] = ()
    released: Callable[[Recognised, Shapes], Mapping[str, object]] = lambda found, shapes: {}
    families: Callable[[Recognised, Shapes], tuple[str, ...]] | None = None
    version: Callable[[Recognised, Shapes], str | None] = _nothing
    complete: Callable[[ConfigDict, Shapes], None] = _nothing
    objective: str | None = None
    licence: str = licences.UNKNOWN
    build: Callable[..., Any] = build_model
    constants: Callable[[Any], Mapping[str, Callable[[], np.ndarray]]] = lambda net: {}
