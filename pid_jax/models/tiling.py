"""Work on image tokens tile by tile, for drawing pictures whose every token takes too much memory.

A tile is a number of rows of patches. Only one at a time is wide: hidden layers, queries and what
attends. Keys and values are those of all tokens, so the result is that of the whole picture.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.models.attention import Attention

Function = Callable[..., Any]


def from_tiles(size: int, function: Function, *arrays: jax.Array, before: Any = None) -> Any:
    """function(*arrays), for arrays [B, L, ...] whose tokens do not see each other in `function`.

    Args:
      size: tokens (or other entries of axis 1) of a tile; 0: all at once.
      function: of parts of the arrays, to a tree of [B, tokens of the part, ...].
      before: a tree of [B, T, ...] that the result, [B, T + L, ...], begins with.
    """
    tokens, ahead = arrays[0].shape[1], jax.tree.leaves(before)[0].shape[1] if before else 0
    if not 0 < size < tokens:
        found = function(*arrays)
        return jax.tree.map(lambda *pair: jnp.concatenate(pair, 1), before, found) if before \
            else found

    def add(whole: Any, start: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(lambda whole, part: _put(whole, part, ahead + start), whole,
                            function(*(_cut(a, start, size) for a in arrays))), None

    if before is None:
        before = jax.tree.map(lambda x: jnp.zeros((x.shape[0], 0, *x.shape[2:]), x.dtype),
                              jax.eval_shape(function, *(a[:, :size] for a in arrays)))
    # Room for all, so that nothing is copied to join the two.
    whole = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, tokens), *[(0, 0)] * (x.ndim - 2))),
                         before)
    return jax.lax.scan(add, whole, _starts(tokens, size)[0])[0]


def updated_by_tiles(size: int, function: Function, x: jax.Array, *arrays: jax.Array) -> jax.Array:
    """As `from_tiles`, for a function that gives new values of x: they take its memory."""
    tokens = x.shape[1]
    if not 0 < size < tokens:
        return function(x, *arrays)

    def update(x: jax.Array, place: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        start, first = place
        old = _cut(x, start, size)
        new = function(old, *(_cut(a, start, size) for a in arrays))
        done = (start + jnp.arange(size) < first).reshape(-1, *[1] * (x.ndim - 2))
        return _put(x, jnp.where(done, old, new), start), None

    return jax.lax.scan(update, x, _starts(tokens, size))[0]


def attended_by_tiles(size: int, attention: Attention, project: Function, rest: Function,
                      stream: jax.Array, *arrays: jax.Array,
                      before: tuple[jax.Array, jax.Array] | None = None,
                      key_mask: jax.Array | None = None) -> tuple[jax.Array, Function]:
    """A block with self-attention.

    Args:
      project: parts of stream and arrays -> q, k, v [B, tokens, heads, d].
      rest: what attention gave, parts of stream and arrays -> new values of the stream.
      before: keys and values [B, T, heads, d] of other tokens, before those of the stream.
      key_mask: of all keys.
    Returns:
      The stream's new values, and the attention of any queries to the same keys.
    """
    keys = from_tiles(size, lambda *parts: project(*parts)[1:], stream, *arrays, before=before)
    attend = lambda q: attention(q, *keys, key_mask=key_mask)[0]
    return updated_by_tiles(size, lambda *parts: rest(attend(project(*parts)[0]), *parts),
                            stream, *arrays), attend


def _starts(tokens: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Where tiles start, and their first token that is in no tile before: the last reaches back."""
    first = np.arange(0, tokens, size, dtype=np.int32)
    return jnp.asarray(np.minimum(first, tokens - size)), jnp.asarray(first)


def _cut(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)


def _put(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=1)
