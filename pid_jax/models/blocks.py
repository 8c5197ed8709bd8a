"""The transformer blocks of PixelDiT as plain functions (PixelDiT paper, section 3)."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pid_jax.models.attention import (Attention, project_qkv, self_attention,
                                      self_attention_spec)
from pid_jax.models.layers import (Params, draw, gelu, linear, linear_spec, mlp_spec, modulate,
                                   modulation_spec, norm_init, rms_norm, swiglu, swiglu_spec,
                                   unstack)
from pid_jax.models.rope import RopeTable
from pid_jax.models.tiling import attended_by_tiles

# Order of the six modulations everywhere: shift, scale, gate of the attention, then of the MLP.


class PatchContext(NamedTuple):
    """What every patch block sees beside its stream."""

    heads: int
    condition: jax.Array  # [B, 1, D]
    image_rope: RopeTable
    text_rope: RopeTable | None
    attention: Attention
    key_mask: jax.Array | None  # [B, text + image tokens], True = attended
    tile: int = 0  # image tokens of a tile, see `models.tiling`; 0: all at once


def patch_block_init(key: jax.Array, hidden: int, heads: int) -> dict:
    """Parameters of one joint block; names end in x (image) or y (text) as in the reference."""
    attention = {f"{name}_{side}": spec for side in "xy"
                 for name, spec in self_attention_spec(hidden, heads).items()}
    return draw(key, {
        **{f"norm_{side}{n}": norm_init(hidden) for side in "xy" for n in (1, 2)},
        **{f"mlp_{side}": swiglu_spec(hidden) for side in "xy"},
        **{f"adaLN_modulation_{side}": modulation_spec(hidden, hidden) for side in ("img", "txt")},
        "attn": attention})


def patch_block(params: Params, stream: tuple[jax.Array, jax.Array],
                context: PatchContext) -> tuple[jax.Array, jax.Array]:
    """Joint attention of image x [B, L, D] and text y [B, T, D], then a SwiGLU on each."""
    x, y = stream
    image_mods = _modulations(params["adaLN_modulation_img"], context.condition)
    text_mods = _modulations(params["adaLN_modulation_txt"], context.condition)
    project = lambda x, *table: _patch_qkv(params, "x", x, image_mods, context.heads,
                                           RopeTable(*(part[0] for part in table)))
    rest = lambda out, x, *_: _patch_rest(params, "x", x, out, image_mods)
    image = x, *(part[None] for part in context.image_rope)
    text_qkv = _patch_qkv(params, "y", y, text_mods, context.heads, context.text_rope)
    if context.tile:
        x, attend = attended_by_tiles(context.tile, context.attention, project, rest, *image,
                                      before=text_qkv[1:], key_mask=context.key_mask)
        y_out = attend(text_qkv[0])
    else:
        x_out, y_out = context.attention(*project(*image), *text_qkv, key_mask=context.key_mask)
        x = rest(x_out, x)
    return x, _patch_rest(params, "y", y, y_out, text_mods)


@jax.named_scope("modulations")
def _modulations(params: Params, condition: jax.Array) -> list[jax.Array]:
    return [linear(part, condition) for part in unstack(params)]


@jax.named_scope("projections")
def _patch_qkv(params, side, tokens, mods, heads, table):
    hidden = modulate(rms_norm(params[f"norm_{side}1"], tokens), *mods[:2])
    attn = {name: params["attn"][f"{name}_{side}"] for name in ("qkv", "q_norm", "k_norm")}
    return project_qkv(attn, hidden, heads, table)


def _patch_rest(params, side, tokens, attended, mods):
    attended = attended.reshape(tokens.shape)
    with jax.named_scope("projections"):
        tokens = tokens + mods[2] * linear(params["attn"][f"proj_{side}"], attended)
    with jax.named_scope("feed-forward"):
        hidden = modulate(rms_norm(params[f"norm_{side}2"], tokens), *mods[3:5])
        return tokens + mods[5] * swiglu(params[f"mlp_{side}"], hidden)


class ClassContext(NamedTuple):
    """What every patch block of the class-conditional network sees beside its stream."""

    heads: int
    condition: jax.Array  # [B, 1, D]
    rope: RopeTable
    attention: Attention


def class_block_init(key: jax.Array, hidden: int, heads: int) -> dict:
    """Parameters of one patch block without text."""
    return draw(key, {
        "norm1": norm_init(hidden), "norm2": norm_init(hidden),
        "attn": self_attention_spec(hidden, heads), "mlp": swiglu_spec(hidden),
        "adaLN_modulation": modulation_spec(hidden, hidden)})


def class_block(params: Params, s: jax.Array, context: ClassContext) -> jax.Array:
    """Attention among patch tokens s [B, L, D], then a SwiGLU."""
    mods = _modulations(params["adaLN_modulation"], context.condition)
    hidden = modulate(rms_norm(params["norm1"], s), *mods[:2])
    s = s + mods[2] * self_attention(params["attn"], hidden, context.heads, context.rope,
                                     context.attention)
    hidden = modulate(rms_norm(params["norm2"], s), *mods[3:5])
    return s + mods[5] * swiglu(params["mlp"], hidden)


class PixelContext(NamedTuple):
    """What every pixel block sees beside its pixels."""

    heads: int
    condition: jax.Array  # [B, L, D], one per patch
    rope: RopeTable
    attention: Attention
    key_mask: jax.Array | None  # [B, L], True = attended
    chunks: int = 1  # parts into which all but the attention is cut, to save memory
    tile: int = 0  # tokens of a tile, see `models.tiling`; 0: all at once


def pixel_block_init(key: jax.Array, hidden: int, channels: int, pixels: int, attn_width: int,
                     heads: int, modulations: int = 6) -> dict:
    """Parameters of one pixel block.

    Args:
      hidden: width of the condition; channels: width of a pixel token; pixels: pixels per patch;
      attn_width: width of the compressed token that attends; heads: its heads.
      modulations: 6, or 4 of `post_modulated_pixel_block`.
    """
    flat = channels * pixels
    return draw(key, {
        "norm1": norm_init(channels), "norm2": norm_init(channels),
        "compress_to_attn": linear_spec(flat, attn_width),
        "attn": self_attention_spec(attn_width, heads),
        "expand_from_attn": linear_spec(attn_width, flat),
        "mlp": mlp_spec(channels),
        "adaLN_modulation": modulation_spec(hidden, flat, modulations)})


def pixel_block(params: Params, z: jax.Array, context: PixelContext) -> jax.Array:
    """Pixel tokens z [B, L, C, P] (P pixels of a patch last), modulated per pixel.

    The patch is compressed to one token for the attention; the feed-forward is per pixel. Each
    modulation, as large as z, is computed where it is used so that few live at a time.
    """
    mods = unstack(params["adaLN_modulation"])

    @jax.named_scope("modulations")
    def modulation(i: int, z: jax.Array, condition: jax.Array) -> jax.Array:
        return linear(mods[i], condition).reshape(z.shape)

    def before(z: jax.Array, condition: jax.Array) -> jax.Array:
        hidden = modulate(rms_norm(params["norm1"], z, axis=-2),
                          *(modulation(i, z, condition) for i in (0, 1)))
        with jax.named_scope("projections"):
            return linear(params["compress_to_attn"], hidden.reshape(*z.shape[:2], -1))

    def after(z: jax.Array, token: jax.Array, condition: jax.Array) -> jax.Array:
        with jax.named_scope("projections"):
            expanded = linear(params["expand_from_attn"], token).reshape(z.shape)
        z = z + modulation(2, z, condition) * expanded
        hidden = modulate(rms_norm(params["norm2"], z, axis=-2),
                          *(modulation(i, z, condition) for i in (3, 4)))
        return z + modulation(5, z, condition) * _channel_mlp(params["mlp"], hidden)

    if context.tile:
        return _pixel_block_by_tiles(params, before, after, z, context)
    token = in_chunks(before, context.chunks, z, context.condition)
    token = self_attention(params["attn"], token, context.heads, context.rope, context.attention,
                           context.key_mask)
    return in_chunks(after, context.chunks, z, token, context.condition)


def _pixel_block_by_tiles(params: Params, before: Callable, after: Callable, z: jax.Array,
                          context: PixelContext) -> jax.Array:
    """`pixel_block` that attends from one tile at a time."""
    def project(z: jax.Array, condition: jax.Array, *table: jax.Array) -> tuple[jax.Array, ...]:
        return project_qkv(params["attn"], before(z, condition), context.heads,
                           RopeTable(*(part[0] for part in table)))

    def rest(out: jax.Array, z: jax.Array, condition: jax.Array, *_: jax.Array) -> jax.Array:
        token = linear(params["attn"]["proj"], out.reshape(*out.shape[:2], -1))
        return after(z, token, condition)

    return attended_by_tiles(context.tile, context.attention, project, rest, z, context.condition,
                             *(part[None] for part in context.rope), key_mask=context.key_mask)[0]


def in_chunks(function: Callable[..., jax.Array], chunks: int, *arrays: jax.Array) -> jax.Array:
    """function(*arrays), for arrays [B, L, ...] whose tokens do not see each other, part by part.

    The backward pass recomputes each part. There are as many parts as divide both `chunks` and
    L. A part takes every n-th token, so that tokens divided over devices stay divided.
    """
    tokens = arrays[0].shape[1]
    parts = math.gcd(chunks, tokens)
    if parts == 1:
        return function(*arrays)
    split = tuple(jnp.moveaxis(a.reshape(a.shape[0], tokens // parts, parts, *a.shape[2:]), 2, 0)
                  for a in arrays)
    out = jax.lax.map(jax.checkpoint(lambda part: function(*part), prevent_cse=False), split)
    return jnp.moveaxis(out, 0, 2).reshape(out.shape[1], tokens, *out.shape[3:])


def post_modulated_pixel_block(params: Params, z: jax.Array, context: PixelContext) -> jax.Array:
    """As `pixel_block` with four modulations (scale, shift of the attention, then of the MLP) that
    act on what a branch gives instead of on what it gets."""
    mods = unstack(params["adaLN_modulation"])
    modulation = lambda i: linear(mods[i], context.condition).reshape(z.shape)
    attended = _patch_attention(params, rms_norm(params["norm1"], z, axis=-2), context)
    z = z + modulate(attended, modulation(1), modulation(0))
    hidden = _channel_mlp(params["mlp"], rms_norm(params["norm2"], z, axis=-2))
    return z + modulate(hidden, modulation(3), modulation(2))


def _patch_attention(params: Params, z: jax.Array, context: PixelContext) -> jax.Array:
    """Each patch of z [B, L, C, P] becomes one token, attends, and becomes pixels again."""
    token = linear(params["compress_to_attn"], z.reshape(*z.shape[:2], -1))
    token = self_attention(params["attn"], token, context.heads, context.rope, context.attention,
                           context.key_mask)
    return linear(params["expand_from_attn"], token).reshape(z.shape)


@jax.named_scope("feed-forward")
def _channel_mlp(params: Params, z: jax.Array) -> jax.Array:
    return channel_linear(params["fc2"], gelu(channel_linear(params["fc1"], z)))


def channel_linear(params: Params, z: jax.Array) -> jax.Array:
    """A linear layer on the channels of pixel tokens: [B, L, C, P] -> [B, L, out, P]."""
    return (channel_product(params["kernel"].astype(z.dtype).T, z)
            + params["bias"].astype(z.dtype)[:, None])


@jax.custom_vjp
def channel_product(kernel: jax.Array, z: jax.Array) -> jax.Array:
    """kernel [out, in], z [B, L, in, P] -> [B, L, out, P]."""
    # One small product per patch: a plain contraction over axis 2 makes XLA transpose z, in
    # the backward pass three times (measured on CPU: 3x slower; TPU: 20% more cycles).
    return jnp.broadcast_to(kernel, (*z.shape[:2], *kernel.shape)) @ z


def _channel_product_forward(kernel, z):
    return channel_product(kernel, z), (kernel, z)


def _channel_product_backward(saved, cotangent):
    kernel, z = saved
    per_patch = cotangent @ jnp.swapaxes(z, -1, -2)
    return per_patch.sum((0, 1)), channel_product(kernel.T, cotangent)


channel_product.defvjp(_channel_product_forward, _channel_product_backward)
