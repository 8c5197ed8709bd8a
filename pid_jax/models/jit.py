"""JiT: a plain transformer on patches of pixels that predicts the clean picture (arXiv 2511.13720).

Pictures are [B, H, W, 3] in [-1, 1]; time t [B] is in [0, 1] and 1 is clean. Context tokens (the
class repeated; in DiTok the latent tokens of a picture) join the patches at one block and leave
them before the last layer.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.errors import UserError
from pid_jax.models.attention import Attention, dense_attention, project_qkv
from pid_jax.models.layers import (TIME_CHANNELS, Params, Uniform, draw, linear, linear_init,
                                   modulate, norm_init, normal, patchify, rms_norm, sincos_table,
                                   unpatchify, unstack)
from pid_jax.models.outputs import NetOutput
from pid_jax.models.placement import Constrain, unconstrained
from pid_jax.models.rope import RopeTable, grid_rope
from pid_jax.models.shell import Init, Shell
from pid_jax.models.stacking import REMAT_POLICIES, run_blocks, stacked_init

TIME_MAX_PERIOD = 10000.0


class JitDims(NamedTuple):
    """What the shapes of a JiT's parameters follow from."""

    input_size: int
    patch_size: int
    hidden_size: int
    depth: int
    num_heads: int
    num_classes: int
    bottleneck_dim: int
    context_start: int
    mlp_ratio: float = 4.0

    @property
    def grid(self) -> int:
        """Patches along a side."""
        return self.input_size // self.patch_size

    @property
    def mlp_width(self) -> int:
        """Inner width of the SwiGLU: two thirds of mlp_ratio * hidden_size, rounded down."""
        return int(int(self.hidden_size * self.mlp_ratio) * 2 / 3)


class Dropout(NamedTuple):
    """Dropout of the projections in the middle half of the blocks (JiT-H trains with 0.2)."""

    rate: float
    key: jax.Array


# ---- initial values -----------------------------------------------------------------------------

def decoder_inits(dims: JitDims) -> dict[str, Init]:
    """The parameters of `denoise` (for `Shell.parameter_inits`), without any context."""
    width, patch = dims.hidden_size, dims.patch_size
    return {
        "x_embedder": functools.partial(draw, specs={
            "proj1": {"kernel": _xavier((patch, patch, 3, dims.bottleneck_dim),
                                        3 * patch**2, dims.bottleneck_dim)},
            "proj2": _linear(dims.bottleneck_dim, width)}),
        "t_embedder": lambda key: {
            name: linear_init(part, n_in, width, kernel=normal(0.02), zero_bias=True)
            for name, part, n_in in zip(("fc1", "fc2"), jax.random.split(key),
                                        (TIME_CHANNELS, width))},
        "y_embedder": lambda key: {"embedding": normal(0.02)(key, (dims.num_classes + 1, width))},
        "blocks": stacked_init(functools.partial(draw, specs=_block_specs(dims)), dims.depth),
        "final_layer": functools.partial(draw, specs={
            "norm": norm_init(width), "adaLN_modulation": _zeros(width, width, 2),
            "linear": _zeros(width, 3 * patch**2)})}


def _block_specs(dims: JitDims) -> dict:
    width, inner = dims.hidden_size, dims.mlp_width
    head = width // dims.num_heads
    return {
        "norm1": norm_init(width), "norm2": norm_init(width),
        "adaLN_modulation": _zeros(width, width, 6),
        "attn": {"qkv": _linear(width, width, 3), "q_norm": norm_init(head),
                 "k_norm": norm_init(head), "proj": _linear(width, width)},
        "mlp": {"w12": _linear(width, inner, 2), "w3": _linear(inner, width)}}


def _xavier(shape: tuple[int, ...], n_in: int, n_out: int) -> Uniform:
    return Uniform(shape, (6 / (n_in + n_out)) ** 0.5)


def _linear(n_in: int, n_out: int, parts: int = 1) -> dict:
    """Glorot uniform of all parts as one matrix, bias zero."""
    lead = (parts,) if parts > 1 else ()
    return {"kernel": _xavier((*lead, n_in, n_out), n_in, parts * n_out),
            "bias": jnp.zeros((*lead, n_out))}


def _zeros(n_in: int, n_out: int, parts: int = 1) -> dict:
    lead = (parts,) if parts > 1 else ()
    return {"kernel": jnp.zeros((*lead, n_in, n_out)), "bias": jnp.zeros((*lead, n_out))}


# ---- embeddings ---------------------------------------------------------------------------------

def time_waves(t: jax.Array) -> jax.Array:
    """[cos, sin](t f) float32 [B, 256] of times in [0, 1], with 128 frequencies 10000^(-i/128)."""
    half = TIME_CHANNELS // 2
    frequencies = TIME_MAX_PERIOD ** (-np.arange(half, dtype=np.float64) / half)
    angles = t.astype(jnp.float32)[:, None] * frequencies.astype(np.float32)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def time_embedding(params: Params, t: jax.Array, dtype: Any) -> jax.Array:
    """t [B] -> [B, W]: fc2(silu(fc1 waves))."""
    waves = time_waves(t).astype(dtype)
    return linear(params["fc2"], jax.nn.silu(linear(params["fc1"], waves)))


def patch_positions(width: int, grid: int) -> np.ndarray:
    """Fixed embedding [grid^2, width] float32: sin, cos of the column, then of the row."""
    table = sincos_table(grid, width // 2).T
    column = np.broadcast_to(table[None], (grid, grid, width // 2))
    row = np.broadcast_to(table[:, None], (grid, grid, width // 2))
    return np.concatenate([column, row], axis=-1).reshape(grid * grid, width)


def embed_patches(params: Params, x: jax.Array, dims: JitDims) -> jax.Array:
    """x [B, H, W, 3] -> tokens [B, L, W] through the bottleneck, without positions.

    A convolution without overlap, as a product: XLA divides that over devices correctly.
    """
    pixels = patchify(x, dims.patch_size)
    kernel = params["proj1"]["kernel"].astype(x.dtype)
    patches = jnp.einsum("blcp,pcd->bld", pixels, kernel.reshape(-1, *kernel.shape[2:]))
    return linear(params["proj2"], patches)


# ---- blocks -------------------------------------------------------------------------------------

class BlockContext(NamedTuple):
    """What every block sees beside its tokens."""

    heads: int
    condition: jax.Array  # [B, 1, W], already silu
    table: RopeTable
    attention: Attention
    rate: float


def jit_block(params: Params, x: jax.Array, context: BlockContext,
              dropout: Params | None = None) -> jax.Array:
    """Modulated attention and SwiGLU on tokens x [B, L, W].

    Args:
      dropout: `key` of this block and `on`, whether it drops at all; None: no dropout.
    """
    mods = [linear(part, context.condition) for part in unstack(params["adaLN_modulation"])]
    keys = (None, None) if dropout is None else jax.random.split(dropout["key"])
    drop = lambda y, key: y if key is None else _drop(y, key, context.rate, dropout["on"])
    attn, mlp = params["attn"], params["mlp"]
    hidden = modulate(rms_norm(params["norm1"], x), *mods[:2])
    out, _ = context.attention(*project_qkv(attn, hidden, context.heads, context.table))
    x = x + mods[2] * drop(linear(attn["proj"], out.reshape(x.shape)), keys[0])
    hidden = modulate(rms_norm(params["norm2"], x), *mods[3:5])
    gate, up = (linear(part, hidden) for part in unstack(mlp["w12"]))
    return x + mods[5] * linear(mlp["w3"], drop(jax.nn.silu(gate) * up, keys[1]))


def _drop(x: jax.Array, key: jax.Array, rate: float, on: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(on, jnp.where(kept, x / (1 - rate), 0), x).astype(x.dtype)


def middle_half(depth: int) -> np.ndarray:
    """Which blocks drop: depth // 4 <= i < 3 (depth // 4), bool [depth]."""
    index = np.arange(depth)
    return (depth // 4 <= index) & (index < 3 * (depth // 4))


def run_jit_blocks(params: Params, x: jax.Array, extra: jax.Array | None, dims: JitDims,
                   context: BlockContext, dropout: Dropout | None, remat: str,
                   collect: bool) -> tuple[jax.Array, list]:
    """Blocks before and after the context tokens `extra` [B, n, W] (None: none) join.

    Returns all tokens after the last block, and the tokens after every block (with `collect`).
    """
    stacked = {"block": params}
    if dropout is not None:
        stacked["dropout"] = {"key": jax.random.split(dropout.key, dims.depth),
                              "on": jnp.asarray(middle_half(dims.depth))}
    start = dims.depth if extra is None else dims.context_start
    shown = []

    def run(x: jax.Array, first: int, last: int) -> jax.Array:
        if first == last:
            return x
        table = grid_rope(dims.hidden_size // dims.num_heads, (dims.grid, dims.grid),
                          x.shape[1] - dims.grid**2)
        here = context._replace(table=table)
        found = run_blocks(lambda p, y: jit_block(p["block"], y, here, p.get("dropout")),
                           _span(stacked, first, last, dims.depth), x, remat=remat,
                           collect=collect)
        shown.extend([found.collected] if collect else [])
        return found.stream

    x = run(x, 0, start)
    if extra is not None:
        x = run(jnp.concatenate([extra, x], axis=1), start, dims.depth)
    return x, shown


def _span(stacked: Any, first: int, last: int, depth: int) -> Any:
    """Blocks first .. last-1 of a stack; the whole stack is handed on uncut."""
    if (first, last) == (0, depth):
        return stacked
    return jax.tree.map(lambda leaf: leaf[first:last], stacked)


def denoise(params: Params, x: jax.Array, t: jax.Array, y: jax.Array, extra: jax.Array | None,
            dims: JitDims, *, dtype: Any = jnp.float32, attention: Attention = dense_attention,
            remat: str = "none", dropout: Dropout | None = None,
            collect: bool = False) -> tuple[NetOutput, dict]:
    """The forward pass of JiT, and of DiTok's decoder.

    Args:
      params: trees of `decoder_inits`; with a `gamma_head` the output has `gamma`.
      x: [B, H, W, 3] noised pictures; t: [B] in [0, 1]; y: int [B], num_classes is "no class".
      extra: context tokens [B, n, W], or None.
    Returns:
      The prediction, and intermediate values (`blocks` only with `collect`).
    """
    t_emb = time_embedding(params["t_embedder"], t, dtype)
    y_emb = params["y_embedder"]["embedding"].astype(dtype)[y]
    tokens = embed_patches(params["x_embedder"], x.astype(dtype), dims)
    condition = jax.nn.silu(t_emb + y_emb)[:, None]
    context = BlockContext(dims.num_heads, condition, None, attention,
                           dropout.rate if dropout else 0.0)
    start = tokens + patch_positions(dims.hidden_size, dims.grid).astype(dtype)
    out, blocks = run_jit_blocks(params["blocks"], start, extra, dims, context, dropout, remat,
                                 collect)
    shown = {"t_emb": t_emb, "y_emb": y_emb, "patch_embed": tokens, "blocks": blocks}
    return _final(params, out[:, -dims.grid**2:], condition, dims), shown


def _final(params: Params, tokens: jax.Array, condition: jax.Array, dims: JitDims) -> NetOutput:
    final = params["final_layer"]
    mods = [linear(part, condition) for part in unstack(final["adaLN_modulation"])]
    features = modulate(rms_norm(final["norm"], tokens), *mods)
    pixels = linear(final["linear"], features).astype(jnp.float32)
    pixels = pixels.reshape(*pixels.shape[:2], -1, 3).swapaxes(-1, -2)
    gamma = None
    if "gamma_head" in params:
        gamma = linear(params["gamma_head"], features)[..., 0].astype(jnp.float32)
    return NetOutput(unpatchify(pixels, (dims.grid,) * 2, dims.patch_size), gamma=gamma)


# ---- the network --------------------------------------------------------------------------------

class JiT(Shell):
    """Class-conditional JiT with the option names of its PyTorch code; the defaults are B/16's."""

    input_size: int = 256
    patch_size: int = 16
    in_channels: int = 3
    hidden_size: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    bottleneck_dim: int = 128
    in_context_len: int = 32
    in_context_start: int = 4
    attn_drop: float = 0.0
    proj_drop: float = 0.0
    dtype: Any = jnp.float32
    remat: str = "none"
    attention: Attention = dense_attention
    constrain: Constrain = unconstrained

    def __post_init__(self):
        super().__post_init__()
        check_dims(self.dims, self.remat)
        _check(self.in_channels == 3, f"in_channels is {self.in_channels}, but pictures have 3")
        _check(self.in_context_len >= 0,
               f"in_context_len is {self.in_context_len}; it must be at least 0")
        check_drops(self.attn_drop, self.proj_drop)

    @property
    def dims(self) -> JitDims:
        """The dimensions, for the plain functions."""
        return JitDims(self.input_size, self.patch_size, self.hidden_size, self.depth,
                       self.num_heads, self.num_classes, self.bottleneck_dim,
                       self.in_context_start, self.mlp_ratio)

    @property
    def null_label(self) -> int:
        """The label that means "no class"."""
        return self.num_classes

    def parameter_inits(self) -> dict[str, Init]:
        """The parameter tree: top-level name -> initialiser of a PRNG key."""
        inits = decoder_inits(self.dims)
        if self.in_context_len:
            inits["in_context_posemb"] = lambda key: normal(0.02)(
                key, (self.in_context_len, self.hidden_size))
        return inits

    def __call__(self, x: jax.Array, t: jax.Array, y: jax.Array,
                 dropout_key: jax.Array | None = None) -> NetOutput:
        """Predicts the clean picture.

        Args:
          x: float32 [B, H, W, 3], noised pictures of side `input_size`.
          t: float32 [B] in [0, 1]; 1 is clean.
          y: int [B], classes; `num_classes` stands for none.
          dropout_key: for training; None drops nothing.
        """
        check_inputs(self.dims, x, t, y)
        out, shown = denoise(
            self.weights, x, t, y, self._context(y), self.dims, dtype=self.dtype,
            attention=self.attention, remat=self.remat,
            dropout=make_dropout(self.proj_drop, dropout_key),
            collect=self.is_mutable_collection("intermediates"))
        for name, value in shown.items():
            self.sow("intermediates", name, value)
        return out

    def _context(self, y: jax.Array) -> jax.Array | None:
        """The class, repeated, each copy with its own position."""
        if not self.in_context_len:
            return None
        y_emb = self.weights["y_embedder"]["embedding"].astype(self.dtype)[y]
        return y_emb[:, None] + self.weights["in_context_posemb"].astype(self.dtype)


def make_dropout(rate: float, key: jax.Array | None) -> Dropout | None:
    """Dropout for a call with this key; None where nothing is to be dropped."""
    return None if key is None or rate == 0 else Dropout(rate, key)


def check_drops(attn_drop: float, proj_drop: float) -> None:
    """Raises UserError for dropout that is not built, or no rate."""
    _check(attn_drop == 0, f"attn_drop is {attn_drop}; dropout inside the attention is not built "
                           "(every released recipe has 0): use proj_drop")
    _check(0 <= proj_drop < 1, f"proj_drop is {proj_drop}; expected at least 0 and below 1")


def check_dims(dims: JitDims, remat: str) -> None:
    """Raises UserError for dimensions that no network can have."""
    for name in ("input_size", "patch_size", "depth", "num_heads", "num_classes",
                 "bottleneck_dim"):
        value = getattr(dims, name)
        _check(value >= 1, f"{name} is {value}; it must be at least 1")
    _check(dims.input_size % dims.patch_size == 0,
           f"patch_size {dims.patch_size} does not divide input_size {dims.input_size}")
    _check(dims.hidden_size % dims.num_heads == 0 and
           dims.hidden_size // dims.num_heads % 4 == 0,
           f"hidden_size {dims.hidden_size} / num_heads {dims.num_heads} must be a multiple of 4, "
           "for the rotary embedding")
    _check(0 <= dims.context_start < dims.depth,
           f"in_context_start is {dims.context_start}; the blocks are 0 to {dims.depth - 1}")
    _check(remat in REMAT_POLICIES,
           f"remat is {remat!r}; choose one of {', '.join(REMAT_POLICIES)}")


def check_inputs(dims: JitDims, x: jax.Array, t: jax.Array, y: jax.Array) -> None:
    """Raises UserError for inputs that do not fit the network."""
    side = dims.input_size
    _check(x.ndim == 4 and x.shape[1:] == (side, side, 3),
           f"pictures have shape {x.shape}; this network takes [batch, {side}, {side}, 3]")
    _check(t.shape == y.shape == x.shape[:1],
           f"t has shape {t.shape} and y {y.shape} for {len(x)} pictures; expected one time and "
           "one class each")


def _check(ok: bool, sentence: str) -> None:
    if not ok:
        raise UserError(sentence)
