"""Which parameters train: regular expressions over paths, with single layers of stacked leaves.

Parameters are nested dicts; the path of a leaf is its keys joined by "/". Leaves frozen as a
whole leave the tree that the optimizer sees (`partition`), so they cost neither gradient nor
optimizer state. Layers frozen inside a stacked leaf [depth, ...] stay, behind a mask.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from pid_jax.errors import UserError

Tree = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Freeze:
    """Freezes the leaves whose whole path matches `pattern`.

    Attributes:
      pattern: regular expression.
      layers: empty for whole leaves; else indices into the leading axis (negative from the end).
    """

    pattern: str
    layers: tuple[int, ...] = ()


LAST_BLOCK_TEXT = Freeze(r"patch_blocks/(attn/proj_y|norm_y2|mlp_y)/.*", layers=(-1,))
"""The text tail of the last patch block feeds nothing: it stays as it was initialised."""

ALL_BUT_LQ = Freeze(r"(?!lq_proj/|pit_lq_gate/).*")
"""Everything outside the low-quality branch (`train_lq_proj_only`)."""

ALL_BUT_LORA = Freeze(r"(?!lora/).*")
"""The network's own parameters, where low-rank adapters train."""


def trainable_mask(params: Tree, rules: Sequence[Freeze]) -> dict:
    """A tree like `params` with True (trains), False (frozen) or a bool array [depth, 1, ...].

    Args:
      params: arrays or abstract shapes.
    Raises:
      UserError: a rule matches no leaf.
    """
    leaves = traverse_util.flatten_dict(params, sep="/")
    mask = dict.fromkeys(leaves, True)
    for rule in rules:
        matched = [path for path in leaves if re.fullmatch(rule.pattern, path)]
        if not matched:
            raise UserError(f"the freezing rule {rule.pattern!r} matches no parameter; the paths "
                            f"look like {next(iter(leaves))!r}")
        for path in matched:
            mask[path] = _freeze(mask[path], rule.layers, leaves[path].shape)
    return traverse_util.unflatten_dict(mask, sep="/")


def _freeze(mask: bool | np.ndarray, layers: tuple[int, ...], shape: tuple[int, ...]
            ) -> bool | np.ndarray:
    if mask is False or not layers:
        return False
    if mask is True:
        mask = np.ones((shape[0],) + (1,) * (len(shape) - 1), bool)
    mask[list(layers)] = False
    return mask if mask.any() else False


def partition(params: Tree, mask: Tree) -> tuple[dict, dict]:
    """Splits `params` into (leaves that train at least in part, wholly frozen leaves)."""
    flat_mask = traverse_util.flatten_dict(mask, sep="/")
    trainable, frozen = {}, {}
    for path, leaf in traverse_util.flatten_dict(params, sep="/").items():
        (frozen if flat_mask[path] is False else trainable)[path] = leaf
    return tuple(traverse_util.unflatten_dict(part, sep="/") for part in (trainable, frozen))


def combine(trainable: Tree, frozen: Tree) -> dict:
    """Undoes `partition`."""
    flat = [traverse_util.flatten_dict(part, sep="/") for part in (trainable, frozen)]
    return traverse_util.unflatten_dict(flat[0] | flat[1], sep="/")


def apply_mask(tree: Tree, mask: Tree) -> Tree:
    """Zeroes what is frozen in `tree`; `mask` has the same leaves (True or bool arrays)."""
    return jax.tree.map(lambda leaf, keep: leaf if keep is True else jnp.where(keep, leaf, 0),
                        tree, mask)
