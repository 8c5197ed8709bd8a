"""Kernels kept in 8 bits, with one float32 scale per output channel.

Only weights are small: a kernel is multiplied out where it is used, block by block, so that the
arithmetic and the activations keep their dtype.
"""

import re
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from pid_jax.errors import UserError
from pid_jax.models.layers import Params

# Attention projections and feed-forwards of the patch blocks: nearly all of what matrix products
# read. The first and last projections, modulations, norms, gates and the pixel blocks stay.
QUANTISED = r"^patch_blocks/(attn/(qkv|proj)(_[xy])?|mlp(_[xy])?/w[123])/kernel$"
LARGEST = {"int8": 127.0, "fp8": 448.0}
DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


@flax.struct.dataclass
class QuantisedKernel:
    """A kernel [..., in, out] of small numbers; `scale` is float32 [..., 1, out]."""

    values: jax.Array
    scale: jax.Array

    def astype(self, dtype: jnp.dtype) -> jax.Array:
        """The kernel itself."""
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)


def quantise_kernel(kernel: jax.Array, kind: str) -> QuantisedKernel:
    """Rounds a kernel [..., in, out]; the largest entry of each output channel stays exact."""
    wide = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-2, keepdims=True)
    scale = jnp.where(largest > 0, largest, 1) / LARGEST[kind]
    values = wide / scale
    if kind == "int8":
        values = jnp.round(values)
    return QuantisedKernel(values.astype(DTYPES[kind]), scale)


def quantise(params: Params, kind: str) -> dict:
    """Parameters of a PixelDiT or PidNet with the kernels of `QUANTISED` in 8 bits.

    Args:
      kind: "int8" (127 steps to each side) or "fp8" (float8_e4m3fn).
    Raises:
      UserError: another kind, or no kernel that can be quantised.
    """
    if kind not in DTYPES:
        raise UserError(f"weights cannot be kept as {kind!r}; choose one of {', '.join(DTYPES)}")
    chosen = 0

    def convert(path: Any, leaf: jax.Array) -> Any:
        nonlocal chosen
        if not re.search(QUANTISED, jax.tree_util.keystr(path, simple=True, separator="/")):
            return leaf
        chosen += 1
        return quantise_kernel(leaf, kind)

    result = jax.tree_util.tree_map_with_path(convert, dict(params))
    if not chosen:
        raise UserError(f"{kind} weights are for networks with patch blocks (PixelDiT, PiD); this "
                        "one has none")
    return result


def is_quantised(tree: Any) -> bool:
    """Whether any kernel of a tree is quantised."""
    return any(isinstance(leaf, QuantisedKernel) for leaf in jax.tree.leaves(
        tree, is_leaf=lambda node: isinstance(node, QuantisedKernel)))


def stored_bytes(tree: Any) -> int:
    """Bytes that a tree of arrays takes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
