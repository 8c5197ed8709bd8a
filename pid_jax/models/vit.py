"""The plain vision transformer inside TiTok: pre-norm blocks with biases and exact GELU.

Source: TiTok (arXiv 2406.07550) and its PyTorch code, whose blocks are CLIP's.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax

from pid_jax.errors import UserError
from pid_jax.models.attention import Attention
from pid_jax.models.convolution import affine_init, layer_norm
from pid_jax.models.layers import (Params, Uniform, draw, linear, mlp, mlp_spec, torch_spec,
                                   unstack)
from pid_jax.models.stacking import run_blocks, stacked_init


class VitDims(NamedTuple):
    """Width, number of blocks and heads."""

    width: int
    layers: int
    heads: int


SIZES = {"small": VitDims(512, 8, 8), "base": VitDims(768, 12, 12), "large": VitDims(1024, 24, 16)}


def vit_dims(size: str, dims: tuple[int, ...] = ()) -> VitDims:
    """The dimensions of a named size, or `dims` (width, layers, heads) where they are given.

    Raises UserError for an unknown name and for dimensions that make no transformer.
    """
    if not dims and size not in SIZES:
        raise UserError(f"the transformer size {size!r} is unknown; choose one of "
                        f"{', '.join(SIZES)}, or give (width, layers, heads)")
    found = VitDims(*dims) if len(dims) == 3 else SIZES.get(size) if not dims else None
    if found is None or min(found) < 1 or found.width % found.heads:
        raise UserError(f"the transformer dimensions are {dims}; expected (width, layers, heads), "
                        "each at least 1, with heads that divide the width")
    return found


def blocks_init(dims: VitDims) -> Callable[[jax.Array], dict]:
    """Initialiser of the stacked blocks."""
    return stacked_init(lambda key: _block_init(key, dims.width), dims.layers)


def _block_init(key: jax.Array, width: int) -> dict:
    # Wider than usual: a tokenizer that stays random (the quick start's) then attends to places
    # and passes on what it finds there.
    qkv = {"kernel": Uniform((3, width, width), math.sqrt(12 / width)),
           "bias": torch_spec(width, 3, width)}
    proj = {"kernel": Uniform((width, width), math.sqrt(6 / width)),
            "bias": torch_spec(width, width)}
    return draw(key, {"ln_1": affine_init(width), "ln_2": affine_init(width),
                      "mlp": mlp_spec(width), "attn": {"qkv": qkv, "proj": proj}})


def run_vit(params: Params, tokens: jax.Array, heads: int, attention: Attention,
            remat: str = "none", collect: bool = False) -> tuple[jax.Array, jax.Array | None]:
    """All blocks on tokens [B, L, W]; with `collect` also the tokens after each, [depth, ...]."""
    run = run_blocks(lambda block, x: vit_block(block, x, heads, attention), params, tokens,
                     remat=remat, collect=collect)
    return run.stream, run.collected


def vit_block(params: Params, x: jax.Array, heads: int, attention: Attention) -> jax.Array:
    """x + attention(norm x), then + mlp(norm x); x [B, L, W]."""
    x = x + _self_attention(params["attn"], layer_norm(params["ln_1"], x), heads, attention)
    return x + mlp(params["mlp"], layer_norm(params["ln_2"], x))


def _self_attention(params: Params, x: jax.Array, heads: int, attention: Attention) -> jax.Array:
    split = (*x.shape[:2], heads, x.shape[-1] // heads)
    out, _ = attention(*(linear(part, x).reshape(split) for part in unstack(params["qkv"])))
    return linear(params["proj"], out.reshape(x.shape))
