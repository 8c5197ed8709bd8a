"""Checksums of what a checkpoint means, not of its files: of every array and of every text.

An array's sum is computed where the array lies, on any number of devices, before it is written and
after it is read, so it covers the way there and back, on any storage. The sums are in the card,
which commits together with the arrays. The sum of words w_i, sum_i w_i * (c * i + 1) mod 2^32 with
c even, has odd weights: any change of one word changes it, and so do words that trade places (but
for one pair in 2^31).
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pid_jax.errors import DamagedCheckpoint
from pid_jax.parallel.sharding import path_name

KEY = "checksums"
SPREAD = 2 * 0x4F1BBCDD  # even, so that every weight is odd
WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def sealed(card: dict, arrays: Mapping[str, Any], texts: Mapping[str, Any]) -> dict:
    """The card with the checksums of all items and, last, its own.

    Args:
      arrays: item -> tree of arrays; texts: item -> what JSON will hold.
    """
    sums = {"arrays": {name: array_sums(tree) for name, tree in arrays.items()},
            "texts": {name: text_sum(text) for name, text in texts.items()}}
    card = {**card, KEY: sums}
    return {**card, KEY: {**sums, "card": text_sum(card)}}


def array_sums(tree: Any) -> dict[str, list]:
    """Path of every leaf -> [dtype, sum]; every process of a run must call it."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    values = jax.device_get(_sums([leaf for _, leaf in leaves]))
    return {path_name(path): [str(leaf.dtype), int(value)]
            for (path, leaf), value in zip(leaves, values)}


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
    return [_sum(leaf) for leaf in leaves]


def _sum(leaf: jax.Array) -> jax.Array:
    """uint32 sum of one array: see the head of this file; the index runs in row-major order."""
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf
    words = jax.lax.bitcast_convert_type(leaf, WORDS[leaf.dtype.itemsize]).astype(jnp.uint32)
    weights, stride = jnp.uint32(1), SPREAD
    for axis in reversed(range(words.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        weights, stride = weights + index * jnp.uint32(stride % 2**32), stride * words.shape[axis]
    return jnp.sum(words * weights, dtype=jnp.uint32)


def text_sum(value: Any) -> str:
    """SHA-256 of a JSON value, however it is laid out."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def refuse_damaged_card(step_folder: Path, card: dict) -> None:
    """Raises DamagedCheckpoint when the card is not what was written; old cards have no sums."""
    if KEY not in card:
        return
    sums = dict(card[KEY])
    if sums.pop("card", None) != text_sum({**card, KEY: sums}):
        raise damaged(step_folder, "card: its checksum does not fit")


def refuse_damaged_text(step_folder: Path, card: dict, name: str, value: Any) -> None:
    """Raises DamagedCheckpoint when a text is not what was written."""
    expected = card.get(KEY, {}).get("texts", {}).get(name)
    if expected is not None and expected != text_sum(value):
        raise damaged(step_folder, f"{name}: its checksum does not fit")


def refuse_damaged_arrays(step_folder: Path, card: dict, name: str, tree: Any) -> None:
    """Raises DamagedCheckpoint, in every process, when arrays are not what was written.

    Leaves read in a narrower dtype than they were written in cannot be looked at.
    """
    expected = card.get(KEY, {}).get("arrays", {}).get(name)
    if expected is None:
        return
    leaves = {path: _as_written(leaf, expected[path][0]) for path, leaf in flat(tree).items()
              if path in expected}
    leaves = {path: leaf for path, leaf in leaves.items() if leaf is not None}
    found = _sums(list(leaves.values()))
    wrong = [path for path, value in zip(leaves, jax.device_get(found))
             if int(value) != expected[path][1]]
    if wrong:
        raise damaged(step_folder, f"{name}: the checksums of {len(wrong)} arrays do not fit, the "
                                   f"first {wrong[0]}")


def flat(tree: Any) -> dict[str, Any]:
    """The leaves of any tree by their path `a/b/0/c`."""
    return {path_name(p): leaf for p, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _as_written(leaf: jax.Array, dtype: str) -> jax.Array | None:
    """The leaf in the dtype of the file, if reading it lost nothing."""
    if str(leaf.dtype) == dtype:
        return leaf
    return leaf.astype(dtype) if jnp.promote_types(dtype, leaf.dtype) == leaf.dtype else None


def damaged(step_folder: Path, what: str) -> DamagedCheckpoint:
    """The sentence about a checkpoint that cannot be used."""
    return DamagedCheckpoint(f"the checkpoint {step_folder} is damaged ({what}); move its folder "
                             "away to go on from an earlier checkpoint")
