"""Which axis of which parameter is divided: ordered rules (regex over the path, tactic).

Each parameter takes the first rule that matches its path. The optimizer's moments and the EMA
carry the parameter's path inside their own, so the same rules place them.
"""

import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pid_jax.errors import UserError

logger = logging.getLogger(__name__)

Tactic = Callable[[str, tuple[int, ...], Mesh], PartitionSpec]
Rules = Sequence[tuple[str, Tactic]]

SMALLEST_DIVIDED = 2**14  # elements; below, a copy on every device costs less than gathering


def replicate(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Every device holds the whole parameter."""
    return PartitionSpec()


def divide_matrix(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Divides the longer of the last two axes that `fsdp` divides.

    Leading axes of stacked blocks stay whole, since a scan walks along them.
    """
    ways = mesh.shape["fsdp"]
    if ways == 1 or math.prod(shape) < SMALLEST_DIVIDED:
        return PartitionSpec()
    axes = [a for a in range(max(0, len(shape) - 2), len(shape)) if shape[a] % ways == 0]
    if not axes:
        logger.info("%s %s: fsdp %d divides neither of the last two axes; whole on every device",
                    path, shape, ways)
        return PartitionSpec()
    chosen = max(axes, key=lambda axis: shape[axis])
    return PartitionSpec(*("fsdp" if axis == chosen else None for axis in range(len(shape))))


RULES: Rules = (
    (r"(^|/)(bias|scale|log_alpha)$", replicate),
    (r"(^|/)(kernel|\w*embedding)$", divide_matrix),
    (r"(^|/)(step|schedule_step|count)$", replicate),
)


def path_name(path: tuple) -> str:
    """A tree path as `a/b/0/c`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def state_shardings(abstract: Any, mesh: Mesh, rules: Rules = RULES) -> Any:
    """The sharding of every leaf of a state known only by shape (`jax.eval_shape`).

    Raises:
      UserError: leaves that no rule matches, all of them named.
    """
    unmatched: list[str] = []

    def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, _spec(path_name(path), leaf.shape, mesh, rules, unmatched))

    shardings = jax.tree_util.tree_map_with_path(place, abstract)
    if unmatched:
        raise UserError(f"no sharding rule matches {', '.join(unmatched)}; add one to the rules")
    return shardings


def _spec(name: str, shape: tuple[int, ...], mesh: Mesh, rules: Rules,
          unmatched: list[str]) -> PartitionSpec:
    for pattern, tactic in rules:
        if re.search(pattern, name):
            return tactic(name, shape, mesh)
    unmatched.append(name)
    return PartitionSpec()
