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
import numpy as np
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
    """Divides the last two axes: the longer over `fsdp`, the other over `sequence`.

    Where an axis does not divide, both go on one, or one is left out. Leading axes of stacked
    blocks stay whole, since a scan walks along them.
    """
    names = [name for name in ("fsdp", "sequence") if mesh.shape[name] > 1]
    if math.prod(shape) < SMALLEST_DIVIDED:
        return PartitionSpec()
    spec: list[tuple[str, ...]] = [()] * len(shape)
    for name in names:
        axis = _axis_for(name, spec, shape, mesh)
        if axis is None:
            logger.info("%s %s: %s %d divides neither of the last two axes; whole along it", path,
                        shape, name, mesh.shape[name])
        else:
            spec[axis] += (name,)
    return PartitionSpec(*(_entry(axes) for axes in spec)) if any(spec) else PartitionSpec()


def _axis_for(name: str, spec: Sequence[tuple[str, ...]], shape: tuple[int, ...],
              mesh: Mesh) -> int | None:
    """The axis to divide over mesh axis `name`: one not divided yet, then the longest."""
    ways = lambda axis: mesh.shape[name] * math.prod(mesh.shape[other] for other in spec[axis])
    fitting = [axis for axis in range(max(0, len(shape) - 2), len(shape))
               if shape[axis] % ways(axis) == 0]
    return max(fitting, key=lambda axis: (not spec[axis], shape[axis]), default=None)


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return axes if len(axes) > 1 else axes[0] if axes else None


RULES: Rules = (
    (r"(^|/)(bias|scale|log_alpha)$", replicate),
    (r"(^|/)(kernel|\w*embedding)$", divide_matrix),
    (r"(^|/)(latent_tokens|mask_token|in_context_posemb)$", replicate),
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


def bytes_per_device(tree: Any) -> int:
    """What one device holds of a tree of shapes with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
               for leaf in jax.tree.leaves(tree))
