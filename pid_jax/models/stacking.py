"""Blocks of equal shape, kept as one dict with a leading axis and applied by `lax.scan`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pid_jax.models.attention import keep_attention

REMAT_POLICIES = ("none", "full", "attention")

# (params of one block, stream) -> stream; a stream is any tree of arrays.
BlockFn = Callable[[Any, Any], Any]


class Injection(NamedTuple):
    """Something done to the stream before block 0, interval, 2*interval, ...

    `apply(params_g, stream, input_g) -> stream` with the g-th slice of `params` and `inputs`,
    trees with a leading axis of ceil(depth / interval).
    """

    interval: int
    params: Any
    inputs: Any
    apply: Callable[[Any, Any, Any], Any]


class BlockRun(NamedTuple):
    """What `run_blocks` gives: the last stream, `tap_of` at each tap, all streams if asked."""

    stream: Any
    taps: tuple[jax.Array, ...]
    collected: Any


def stacked_init(init: Callable[[jax.Array], Any], count: int) -> Callable[[jax.Array], Any]:
    """An initialiser whose leaves have a leading axis `count`, drawn independently."""
    # A loop, not vmap: batched random numbers take XLA twice as long to compile.
    return lambda key: jax.lax.map(init, jax.random.split(key, count))


def rematerialised(function: Callable, policy: str, unroll: int = 1) -> Callable:
    """`function` that recomputes in the backward pass: everything, or all but attention outputs."""
    if policy == "none":
        return function
    # In a loop nothing can be merged across the forward and backward pass; without one, it could.
    return jax.checkpoint(function, prevent_cse=unroll > 1,
                          policy=keep_attention if policy == "attention" else None)


def run_blocks(block: BlockFn, params: Any, stream: Any, *, depth: int | None = None,
               taps: Sequence[int] = (), tap_of: Callable[[Any], jax.Array] = lambda s: s,
               injection: Injection | None = None, remat: str = "none",
               collect: bool = False, unroll: int = 1) -> BlockRun:
    """Runs blocks 0 .. depth-1 of a stack.

    Args:
      params: tree whose leaves have a leading axis of at least `depth` blocks.
      depth: how many blocks to run; default all.
      taps: 0-based blocks after which `tap_of(stream)` is wanted.
      remat: "none", "full" or "attention", for each block and each injection.
      collect: also return the stream after every block, stacked (for tests).
      unroll: blocks in one turn of the loop. More of them take longer to compile, but what the
        backward pass needs of them is not copied into and out of stacked arrays.
    """
    depth = len(jax.tree.leaves(params)[0]) if depth is None else depth
    interval = injection.interval if injection else depth
    held_taps = tuple(tap for tap in taps if tap != depth - 1)
    one_block = _block_step(rematerialised(block, remat, unroll), held_taps, tap_of, collect)
    inject = rematerialised(injection.apply, remat, unroll) if injection else None

    def one_group(carry, xs):
        indices, block_params, gate = xs
        stream, held = carry
        stream = inject(gate[0], stream, gate[1]) if inject else stream
        return jax.lax.scan(one_block, (stream, held), (indices, block_params),
                            unroll=min(unroll, len(indices)))

    carry = stream, tuple(jnp.zeros_like(tap_of(stream)) for _ in held_taps)
    collected = []
    for start, stop, size in _group_spans(depth, interval):
        blocks = _grouped((jnp.arange(depth), params), start, stop, size)
        gates = (injection.params, injection.inputs) if injection else ()
        gates = _grouped(gates, start // interval, -(-stop // interval))
        groups = min(max(1, unroll // size), (stop - start) // size)
        carry, streams = jax.lax.scan(one_group, carry, (*blocks, gates), unroll=groups)
        collected.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), streams))
    found = dict(zip(held_taps, carry[1])) | {depth - 1: tap_of(carry[0])}
    return BlockRun(carry[0], tuple(found[tap] for tap in taps),
                    jax.tree.map(lambda *parts: jnp.concatenate(parts), *collected))


def _block_step(block: BlockFn, taps: Sequence[int], tap_of: Callable[[Any], jax.Array],
                collect: bool) -> Callable:
    """One step of the scan over blocks; the taps ride along in the carry.

    Selecting at every block is cheaper than cutting the scan at a tap: that would copy the
    stacked parameters of each segment and compile the block once more.
    """

    def step(carry, xs):
        stream, held = carry
        index, block_params = xs
        stream = block(block_params, stream)
        here = tap_of(stream)
        held = tuple(jnp.where(index == tap, here, old) for tap, old in zip(taps, held))
        return (stream, held), stream if collect else None

    return step


def _grouped(tree: Any, start: int, stop: int, size: int | None = None) -> Any:
    """Entries start .. stop-1 of every leaf, in groups of `size` (None: not grouped)."""
    group = lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]) if size else leaf
    return jax.tree.map(lambda leaf: group(leaf[start:stop]), tree)


def _group_spans(depth: int, interval: int) -> list[tuple[int, int, int]]:
    """(first block, one past the last, group size): the whole groups, then what is left over."""
    whole = depth // interval * interval
    spans = [(0, whole, interval), (whole, depth, depth - whole)]
    return [span for span in spans if span[1] > span[0]]
