"""Attention: the interface that networks call, the dense default, and the projections around it.

A network receives `attention(q, k, v, text_q=None, text_k=None, text_v=None, key_mask=None)` and
gets `(image_out, text_out | None)` back. All are [B, L, heads, d]; q is not scaled (the callee
applies d**-0.5). Image tokens may be sharded by the callee, text is replicated. `key_mask`
[B, keys] is True where a key may be attended, in the order text, image.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pid_jax.models.layers import (Params, linear, linear_spec, norm_init, rms_norm, torch_spec,
                                   unstack)
from pid_jax.models.rope import RopeTable, rotate

Attention = Callable[..., tuple[jax.Array, jax.Array | None]]

# What an attention's backward pass needs from its forward pass carries this name: the remat policy
# "attention" keeps it. Fused kernels whose results cannot be named are known by their primitive.
SAVED_ATTENTION = "attention_output"
SAVED_PRIMITIVES = ("dot_product_attention_fwd_wrapper",)


_keep_named = jax.checkpoint_policies.save_only_these_names(SAVED_ATTENTION)


def keep_attention(primitive: Any, *args: Any, **params: Any) -> bool:
    """The remat policy "attention", for `jax.checkpoint`."""
    return primitive.name in SAVED_PRIMITIVES or _keep_named(primitive, *args, **params)


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, text_q: jax.Array | None = None,
                    text_k: jax.Array | None = None, text_v: jax.Array | None = None,
                    key_mask: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
    """Softmax attention over [text, image] with the whole score matrix in memory."""
    if text_q is None:
        return softmax_attention(q, k, v, key_mask), None
    joined = [jnp.concatenate(pair, axis=1) for pair in ((text_q, q), (text_k, k), (text_v, v))]
    out = softmax_attention(*joined, key_mask)
    length = text_q.shape[1]
    return out[:, length:], out[:, :length]


@jax.named_scope("attention")
def softmax_attention(q: jax.Array, k: jax.Array, v: jax.Array,
                      key_mask: jax.Array | None = None) -> jax.Array:
    """softmax(q k^T d^-0.5) v, [B, L, H, d]; scores and softmax in float32.

    A query with no key to attend to gets zeros, as PyTorch's attention gives. The result carries
    the name `SAVED_ATTENTION`.
    """
    q = q * q.shape[-1] ** -0.5
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    weights = _masked_softmax(scores, key_mask).astype(v.dtype)
    return checkpoint_name(jnp.einsum("bhqk,bkhd->bqhd", weights, v), SAVED_ATTENTION)


def _masked_softmax(scores: jax.Array, key_mask: jax.Array | None) -> jax.Array:
    if key_mask is None:
        return jax.nn.softmax(scores, axis=-1)
    allowed = key_mask[:, None, None, :]
    scores = jnp.where(allowed, scores, jnp.finfo(scores.dtype).min)
    return jnp.where(allowed, jax.nn.softmax(scores, axis=-1), 0)


@jax.named_scope("projections")
def project_qkv(params: Params, x: jax.Array, heads: int,
                table: RopeTable | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [B, L, D] -> normed and turned q, k and plain v, [B, L, heads, D/heads] each."""
    split = (*x.shape[:2], heads, x.shape[-1] // heads)
    q, k, v = (linear(part, x).reshape(split) for part in unstack(params["qkv"]))
    q = rotate(rms_norm(params["q_norm"], q), table)
    k = rotate(rms_norm(params["k_norm"], k), table)
    return q, k, v


def self_attention_spec(width: int, heads: int) -> dict:
    """Parameters of `self_attention`, for `draw`: q, k, v are one leaf [3, width, width]."""
    return {"qkv": {"kernel": torch_spec(width, 3, width, width)},
            "q_norm": norm_init(width // heads), "k_norm": norm_init(width // heads),
            "proj": linear_spec(width, width)}


def self_attention(params: Params, x: jax.Array, heads: int, table: RopeTable,
                   attention: Attention, key_mask: jax.Array | None = None) -> jax.Array:
    """Attention among tokens x [B, L, D] with q/k norms and rotary positions, then `proj`."""
    out, _ = attention(*project_qkv(params, x, heads, table), key_mask=key_mask)
    with jax.named_scope("projections"):
        return linear(params["proj"], out.reshape(x.shape))
