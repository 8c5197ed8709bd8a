"""PixelDiT's encoder-decoder path: windows of patch tokens are merged around the patch blocks.

Stages of plain transformer blocks surround the joint blocks; each encoder stage ends with a merge
of `window` x `window` tokens, each decoder stage with the matching expansion and a skip. With
token shuffle, the attention inside a stage's block runs on a smaller grid as well.
"""

import functools
import math
from typing import Any

import jax

from pid_jax.errors import UserError
from pid_jax.models.attention import self_attention, self_attention_spec
from pid_jax.models.layers import (Params, draw, gelu, linear, linear_spec, mlp, mlp_spec, modulate,
                                   modulation_spec, norm_init, rms_norm, unstack)
from pid_jax.models.stacking import rematerialised

Grid = tuple[int, int]


# ---- sizes --------------------------------------------------------------------------------------

def width(net: Any) -> int:
    """Channels of the stages."""
    return net.ed_hidden_size or net.hidden_size


def heads(net: Any) -> int:
    """Attention heads of the stages."""
    return net.ed_num_heads or net.num_groups


def stages(net: Any) -> int:
    """Stages on either side: log2 of the compress ratio."""
    return net.ed_compress_ratio.bit_length() - 1


def compressed_grid(net: Any, grid: Grid) -> Grid:
    """The grid that the patch blocks see."""
    factor = net.ed_window_size ** stages(net) if net.enable_ed else 1
    return grid[0] // factor, grid[1] // factor


def check_options(net: Any) -> None:
    """Raises UserError for encoder-decoder options that do not work."""
    ratio = net.ed_compress_ratio
    if ratio < 1 or ratio & (ratio - 1):
        raise UserError(f"ed_compress_ratio is {ratio}; it must be a power of two")
    if net.ed_window_size < 1 or net.ed_depth_per_stage < 0:
        raise UserError(f"ed_window_size is {net.ed_window_size} and ed_depth_per_stage is "
                        f"{net.ed_depth_per_stage}; they must be at least 1 and 0")
    if width(net) % heads(net) or width(net) // heads(net) % 4:
        raise UserError(f"ed_hidden_size {width(net)} / ed_num_heads {heads(net)} must give heads "
                        f"of a multiple of 4 channels")


def check_grid(grid: Grid, window: int) -> None:
    """Raises UserError unless windows tile the token grid."""
    if grid[0] % window or grid[1] % window:
        raise UserError(f"the {grid[0]} x {grid[1]} token grid of the encoder-decoder path does "
                        f"not divide into {window} x {window} windows; crop the image so that it "
                        f"does")


# ---- windows ------------------------------------------------------------------------------------

def aligned_width(channels: int, window: int) -> int:
    """The least multiple of window^2 that is at least `channels`."""
    return math.ceil(channels / window**2) * window**2


def gather_windows(x: jax.Array, grid: Grid, window: int) -> jax.Array:
    """[B, L, m] -> [B, L / window^2, window^2 * m], order (row, column, channel) in a window."""
    check_grid(grid, window)
    b, _, m = x.shape
    rows, columns = grid[0] // window, grid[1] // window
    x = x.reshape(b, rows, window, columns, window, m).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, rows * columns, window**2 * m)


def scatter_windows(x: jax.Array, grid: Grid, window: int) -> jax.Array:
    """Inverse of `gather_windows`; `grid` is the small grid of x."""
    b, _, wide = x.shape
    rows, columns = grid
    x = x.reshape(b, rows, columns, window, window, wide // window**2)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, rows * columns * window**2, -1)


def merge_spec(channels: int, window: int) -> dict:
    """Parameters of `merge`; adapters exist only when window^2 does not divide the channels."""
    aligned = aligned_width(channels, window)
    spec = {"proj_down": linear_spec(aligned, aligned // window**2)}
    if aligned == channels:
        return spec
    return spec | {"adapter_in": linear_spec(channels, aligned),
                   "proj_out": linear_spec(aligned, channels)}


def merge(params: Params, x: jax.Array, grid: Grid, window: int, last_gelu: bool) -> jax.Array:
    """One token a window: [B, L, d] -> [B, L / window^2, d].

    `last_gelu`: whether the adapter back to d channels is followed by GELU (between stages yes,
    in front of an attention no).
    """
    if "adapter_in" in params:
        x = gelu(linear(params["adapter_in"], x))
    x = gather_windows(linear(params["proj_down"], x), grid, window)
    if "proj_out" in params:
        x = linear(params["proj_out"], x)
        x = gelu(x) if last_gelu else x
    return x


def expand_spec(channels: int, window: int) -> dict:
    """Parameters of `expand`, the mirror of `merge_spec`."""
    aligned = aligned_width(channels, window)
    spec = {"proj_up": linear_spec(aligned // window**2, aligned)}
    if aligned == channels:
        return spec
    return spec | {"proj_in": linear_spec(channels, aligned),
                   "adapter_out": linear_spec(aligned, channels)}


def expand(params: Params, x: jax.Array, grid: Grid, window: int) -> jax.Array:
    """A window of tokens from each: [B, l, d] -> [B, l * window^2, d]; `grid` is x's."""
    if "proj_in" in params:
        x = linear(params["proj_in"], x)
    x = gelu(linear(params["proj_up"], scatter_windows(x, grid, window)))
    return gelu(linear(params["adapter_out"], x)) if "adapter_out" in params else x


# ---- blocks and stages --------------------------------------------------------------------------

def block_spec(channels: int, n_heads: int, shuffle_window: int) -> dict:
    """Parameters of one stage block; windows above 1 add the token shuffle around its attention."""
    spec = {"norm1": norm_init(channels), "norm2": norm_init(channels),
            "attn": self_attention_spec(channels, n_heads), "mlp": mlp_spec(channels),
            "adaLN_modulation": modulation_spec(channels, channels)}
    if shuffle_window == 1:
        return spec
    return spec | {"shuffle_merge": merge_spec(channels, shuffle_window),
                   "shuffle_expand": expand_spec(channels, shuffle_window)}


def block(params: Params, x: jax.Array, condition: jax.Array, net: Any, grid: Grid,
          window: int) -> jax.Array:
    """Attention and MLP with adaLN from condition [B, 1, d] on x [B, L, d]."""
    mods = [linear(part, condition) for part in unstack(params["adaLN_modulation"])]
    hidden = modulate(rms_norm(params["norm1"], x), *mods[:2])
    x = x + mods[2] * _shuffled_attention(params, hidden, net, grid, window)
    hidden = modulate(rms_norm(params["norm2"], x), *mods[3:5])
    return x + mods[5] * mlp(params["mlp"], hidden)


def _shuffled_attention(params, x, net, grid, window):
    if window > 1:
        x = merge(params["shuffle_merge"], x, grid, window, last_gelu=False)
        grid = (grid[0] // window, grid[1] // window)
    table = net.rope_for(width(net) // heads(net), grid)
    x = self_attention(params["attn"], x, heads(net), table, net.attention)
    return expand(params["shuffle_expand"], x, grid, window) if window > 1 else x


def shuffle_windows(net: Any, side: str) -> list[int]:
    """Token-shuffle window of each stage: 2^(S-i) in the encoder, 2^i in the decoder."""
    count = stages(net)
    if not net.ed_use_token_shuffle:
        return [1] * count
    return [2 ** (count - i if side == "encoder_ed" else i) for i in range(count)]


def parameter_inits(net: Any) -> dict:
    """Top-level parameters that the encoder-decoder path adds to PixelDiT."""
    hidden, channels, window = net.hidden_size, width(net), net.ed_window_size
    specs = {"s_ed_in_norm": norm_init(channels), "s_ed_out_norm": norm_init(hidden),
             "encoder_ed": _stages_spec(net, "encoder_ed", merge=merge_spec(channels, window)),
             "decoder_ed": _stages_spec(net, "decoder_ed", expand=expand_spec(channels, window))}
    if channels != hidden:
        specs["s_ed_proj_in"] = linear_spec(hidden, channels)
        specs["s_ed_proj_out"] = linear_spec(channels, hidden)
        specs["s_ed_cond_proj"] = linear_spec(hidden, channels)
    return {name: functools.partial(draw, specs=spec) for name, spec in specs.items()}


def _stages_spec(net: Any, side: str, **resize: dict) -> dict:
    stage = lambda window: resize | {
        f"blocks_{j}": block_spec(width(net), heads(net), window)
        for j in range(net.ed_depth_per_stage)}
    return {f"stages_{i}": stage(window) for i, window in enumerate(shuffle_windows(net, side))}


def _run_stage(params, x, condition, net, grid, window):
    for j in range(net.ed_depth_per_stage):
        run = rematerialised(functools.partial(block, net=net, grid=grid, window=window), net.remat)
        x = run(params[f"blocks_{j}"], x, condition)
    return x


def _maybe(weights: Params, name: str, x: jax.Array) -> jax.Array:
    """A projection that exists only when the stages are not as wide as the network."""
    return linear(weights[name], x) if name in weights else x


def _enter(weights, x):
    return rms_norm(weights["s_ed_in_norm"], _maybe(weights, "s_ed_proj_in", x))


def _leave(weights, x, t_emb):
    x = rms_norm(weights["s_ed_out_norm"], _maybe(weights, "s_ed_proj_out", x))
    return jax.nn.silu(t_emb + x)


def _stage_condition(weights, t_emb):
    return _maybe(weights, "s_ed_cond_proj", jax.nn.silu(t_emb))


def encode(net: Any, weights: Params, tokens: jax.Array, t_emb: jax.Array,
           grid: Grid) -> tuple[jax.Array, list[jax.Array]]:
    """Patch tokens [B, L, D] -> fewer tokens for the patch blocks, and each stage's skip."""
    x, condition, skips = _enter(weights, tokens), _stage_condition(weights, t_emb), []
    for i, window in enumerate(shuffle_windows(net, "encoder_ed")):
        stage = weights["encoder_ed"][f"stages_{i}"]
        x = _run_stage(stage, x, condition, net, grid, window)
        skips.append(x)
        x = merge(stage["merge"], x, grid, net.ed_window_size, last_gelu=True)
        grid = (grid[0] // net.ed_window_size, grid[1] // net.ed_window_size)
    return _leave(weights, x, t_emb), skips


def decode(net: Any, weights: Params, tokens: jax.Array, t_emb: jax.Array,
           skips: list[jax.Array], grid: Grid) -> jax.Array:
    """Tokens after the patch blocks -> full grid [B, L, D].

    The caller adds t_emb and SiLU, as it does without the encoder-decoder path.
    """
    x, condition = _enter(weights, tokens), _stage_condition(weights, t_emb)
    grid = compressed_grid(net, grid)
    for i, window in enumerate(shuffle_windows(net, "decoder_ed")):
        stage = weights["decoder_ed"][f"stages_{i}"]
        x = _run_stage(stage, x, condition, net, grid, window)
        x = expand(stage["expand"], x, grid, net.ed_window_size)
        grid = (grid[0] * net.ed_window_size, grid[1] * net.ed_window_size)
        x = x + skips[-1 - i]
    return rms_norm(weights["s_ed_out_norm"], _maybe(weights, "s_ed_proj_out", x))
