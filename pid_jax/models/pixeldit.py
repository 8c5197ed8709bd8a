"""Text-to-image PixelDiT: joint patch-level blocks, then per-pixel blocks (arXiv 2511.20645).

The class is a thin Flax shell: its parameters are one table of initialisers, its forward pass a
sequence of plain functions. PidNet subclasses it and hands `run` its injection and its pixel gate.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pid_jax.errors import UserError
from pid_jax.models import repa
from pid_jax.models import token_compression as compression
from pid_jax.models.attention import Attention, dense_attention
from pid_jax.models.blocks import (PatchContext, PixelContext, channel_linear, patch_block,
                                   patch_block_init, pixel_block, pixel_block_init)
from pid_jax.models.layers import (draw, join_positions, linear, linear_init, linear_spec,
                                   norm_init, normal, patchify, position_parts, rms_norm,
                                   time_embedding, time_init, to_grid, unpatchify, xavier_uniform,
                                   zeros)
from pid_jax.models.outputs import NetOutput
from pid_jax.models.placement import MAP, ROWS, TEXT, TOKENS, Constrain, unconstrained
from pid_jax.models.rope import ROPE_MODES, RopeTable, image_rope, text_rope
from pid_jax.models.shell import Init, Shell
from pid_jax.models.stacking import REMAT_POLICIES, Injection, run_blocks, stacked_init
from pid_jax.models.tiling import from_tiles


class PixelDiT(Shell):
    """Text-to-image PixelDiT. Option names and defaults are those of the PyTorch reference.

    Beyond them: `repa_features` (width of the frozen features of REPA; 0: no projector in the
    parameters), `repa_width` (of the projector's hidden layers), `dtype` (of the arithmetic),
    `param_dtype`, `remat` ("none", "full", "attention": recompute all of a block or all but its
    attention in the backward pass), `unroll` (blocks in one turn of the loop over blocks, see
    `models.stacking`), `pit_chunks` (parts into which the pixel blocks cut their tokens, to save
    memory), `tile_rows` (for drawing: rows of patches worked on at a time, see
    `models.tiling`; 0: all), `attention` (the injected attention, see `models.attention`) and
    `constrain` (see `models.placement`).
    """

    in_channels: int = 3
    num_groups: int = 24
    hidden_size: int = 1536
    pixel_hidden_size: int = 16
    pixel_attn_hidden_size: int = 1152
    pixel_num_groups: int = 16
    patch_depth: int = 14
    pixel_depth: int = 2
    num_text_blocks: int = 4  # accepted as the reference does; nothing depends on it
    patch_size: int = 16
    txt_embed_dim: int = 2304
    txt_max_length: int = 300
    use_text_rope: bool = True
    text_rope_theta: float = 10000.0
    rope_mode: str = "original"
    rope_ref_h: int = 1024
    rope_ref_w: int = 1024
    repa_encoder_index: int = -1
    repa_features: int = 0
    repa_width: int = 2048
    enable_ed: bool = False
    ed_compress_ratio: int = 1
    ed_depth_per_stage: int = 1
    ed_window_size: int = 2
    ed_num_heads: int | None = None
    ed_hidden_size: int | None = None
    ed_use_token_shuffle: bool = True
    dtype: Any = jnp.float32
    remat: str = "none"
    unroll: int = 1
    pit_chunks: int = 1
    tile_rows: int = 0
    attention: Attention = dense_attention
    constrain: Constrain = unconstrained

    def __post_init__(self):
        super().__post_init__()
        check_options(self)

    def parameter_inits(self) -> dict[str, Init]:
        """The parameter tree: top-level name -> initialiser of a PRNG key."""
        hidden, pixel, patch = self.hidden_size, self.pixel_hidden_size, self.patch_size
        colours = self.in_channels
        inits = {
            "t_embedder": functools.partial(time_init, hidden=hidden),
            "s_embedder": lambda key: {"proj": linear_init(
                key, colours * patch**2, hidden, kernel=xavier_uniform, zero_bias=True)},
            "y_embedder": functools.partial(draw, specs={
                "proj": linear_spec(self.txt_embed_dim, hidden), "norm": norm_init(hidden)}),
            "y_pos_embedding": lambda key: normal(1.0)(key, (1, self.txt_max_length, hidden)),
            "patch_blocks": stacked_init(functools.partial(
                patch_block_init, hidden=hidden, heads=self.num_groups), self.patch_depth),
            "pixel_embedder": functools.partial(draw, specs={"proj": linear_spec(colours, pixel)}),
            "pixel_blocks": stacked_init(functools.partial(
                pixel_block_init, hidden=hidden, channels=pixel, pixels=patch**2,
                attn_width=self.pixel_attn_hidden_size, heads=self.pixel_num_groups),
                self.pixel_depth),
            "final_layer": lambda key: {"norm": norm_init(pixel), "linear": linear_init(
                key, pixel, colours, kernel=zeros, zero_bias=True)},
        }
        inits |= repa.parameter_inits(hidden, self.repa_width, self.repa_features)
        return inits | (compression.parameter_inits(self) if self.enable_ed else {})

    def __call__(self, x: jax.Array, t: jax.Array, y: jax.Array, mask: jax.Array | None = None,
                 feature_indices: tuple[int, ...] = (),
                 return_features_early: bool = False) -> NetOutput:
        """Predicts from noised images.

        Args:
          x: [B, H, W, 3] float32; H and W multiples of `patch_size`.
          t: [B] float32, time in 0..1000.
          y: [B, T, txt_embed_dim] caption embeddings; tokens beyond txt_max_length are dropped.
          mask: None, or bool [B, L] with the reference's meaning: its first tokens, negated,
            choose the text keys of the joint attention (no image key is attended there), and it
            chooses the patches that the pixel blocks attend to.
          feature_indices: 0-based patch blocks whose image tokens are returned as `features`.
          return_features_early: stop after the last of them; `x` is None then.
        """
        return self.run(x, t, y, mask, feature_indices, return_features_early)

    def run(self, x: jax.Array, t: jax.Array, y: jax.Array, mask: jax.Array | None = None,
            feature_indices: tuple[int, ...] = (), return_features_early: bool = False,
            injection: Injection | None = None,
            pixel_gate: Callable[[jax.Array], jax.Array] | None = None) -> NetOutput:
        """The forward pass of `__call__` with the two places where PidNet reaches in.

        Args:
          injection: applied to the image stream [B, L, D] before every interval-th patch block.
          pixel_gate: applied to silu(t_emb + s) [B, L, D], the condition of the pixel blocks.
        """
        check_inputs(self, x, t, y, mask, feature_indices, return_features_early)
        grid = (x.shape[1] // self.patch_size, x.shape[2] // self.patch_size)
        patches = self.constrain(self._patches(x, grid), TOKENS)
        t_emb = time_embedding(self.weights["t_embedder"], t, self.dtype)[:, None]
        tokens = linear(self.weights["s_embedder"]["proj"], patches.reshape(*patches.shape[:2], -1))
        tokens, text = self._placed((tokens, self._text_tokens(y)))
        for name, value in (("t_embedder", t_emb[:, 0]), ("s_embedder", tokens)):
            self.sow("intermediates", name, value)

        taps = self._taps(feature_indices, return_features_early)
        s, found = self._patch_path(tokens, text, t_emb, mask, grid, taps, return_features_early,
                                    injection)
        block_grid = compression.compressed_grid(self, grid)
        features = tuple(self.constrain(to_grid(found[k], block_grid), MAP)
                         for k in sorted(set(feature_indices)))
        repa_tokens = found.get(self.repa_encoder_index - 1)
        if return_features_early:
            return NetOutput(features=features, repa_tokens=repa_tokens)
        condition = jax.nn.silu(t_emb + s)
        out = self._pixel_path(patches, condition if pixel_gate is None else pixel_gate(condition),
                               mask, grid)
        return NetOutput(out, features, condition if repa_tokens is None else repa_tokens)

    def _placed(self, stream: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The (image, text) stream where the mesh wants it."""
        return self.constrain(stream[0], TOKENS), self.constrain(stream[1], TEXT)

    def _rows_placed(self, x: jax.Array) -> jax.Array:
        """Pictures [B, H, W, 3], divided as their tokens are."""
        rows = x.reshape(x.shape[0], -1, self.patch_size, *x.shape[2:])
        return self.constrain(rows, ROWS).reshape(x.shape)

    def _text_tokens(self, y: jax.Array) -> jax.Array:
        y = y[:, :self.txt_max_length].astype(self.dtype)
        weights = self.weights["y_embedder"]
        text = rms_norm(weights["norm"], linear(weights["proj"], y))
        self.sow("intermediates", "y_embedder", text)
        return text + self.weights["y_pos_embedding"][:, :y.shape[1]].astype(self.dtype)

    def _taps(self, feature_indices: tuple[int, ...], early: bool) -> tuple[int, ...]:
        """Blocks whose image tokens are wanted: the features', and REPA's when it is run."""
        last = max(feature_indices) if early else self.patch_depth - 1
        repa = self.repa_encoder_index - 1
        wanted = set(feature_indices) | ({repa} if 0 <= repa <= last else set())
        return tuple(sorted(wanted))

    def _patch_path(self, tokens, text, t_emb, mask, grid, taps, early, injection):
        """Image tokens after the patch blocks, and {block: image tokens} at the taps."""
        condition = jax.nn.silu(t_emb)
        skips = ()
        if self.enable_ed:
            tokens, skips = compression.encode(self, self.weights, tokens, t_emb, grid)
        context = self._patch_context(condition, mask, text.shape[1], tokens.shape[1],
                                      compression.compressed_grid(self, grid))
        result = run_blocks(
            lambda params, stream: self._placed(patch_block(params, stream, context)),
            self.weights["patch_blocks"], (tokens, text), taps=taps,
            depth=taps[-1] + 1 if early else None, tap_of=lambda stream: stream[0],
            injection=_on_image(injection), remat=self.remat,
            collect=self.is_mutable_collection("intermediates"), unroll=self.unroll)
        self.sow("intermediates", "patch_blocks", result.collected)
        tokens = result.stream[0]
        if self.enable_ed and not early:
            tokens = compression.decode(self, self.weights, tokens, t_emb, skips, grid)
        return tokens, dict(zip(taps, result.taps))

    def _patch_context(self, condition, mask, text_length, image_length, grid) -> PatchContext:
        head_dim = self.hidden_size // self.num_groups
        table = text_rope(head_dim, text_length, self.text_rope_theta)
        return PatchContext(
            self.num_groups, condition, self.rope_for(head_dim, grid),
            table if self.use_text_rope else None, self.attention,
            None if mask is None else joint_key_mask(mask, text_length, image_length),
            self.tile_rows * grid[1])

    def rope_for(self, head_dim: int, grid: tuple[int, int]) -> RopeTable:
        """Rotary tables of a token grid (rows, columns)."""
        reference = (self.rope_ref_h // self.patch_size, self.rope_ref_w // self.patch_size)
        return image_rope(head_dim, grid, self.rope_mode, reference)

    def _pixel_path(self, patches, condition, mask, grid) -> jax.Array:
        """[B, L, 3, P] patches and [B, L, D] conditions -> [B, H, W, 3] float32."""
        z = self._pixel_tokens(patches, grid)
        self.sow("intermediates", "pixel_embedder", z)
        context = PixelContext(
            self.pixel_num_groups, condition,
            self.rope_for(self.pixel_attn_hidden_size // self.pixel_num_groups, grid),
            self.attention, mask, self.pit_chunks, self.tile_rows * grid[1])
        result = run_blocks(
            lambda params, z: self.constrain(pixel_block(params, z, context), TOKENS),
            self.weights["pixel_blocks"], self.constrain(z, TOKENS),
            remat=self.remat, collect=self.is_mutable_collection("intermediates"),
            unroll=self.unroll)
        self.sow("intermediates", "pixel_blocks", result.collected)
        return self._rows_placed(self._picture(result.stream, grid))

    def _pixel_tokens(self, patches, grid) -> jax.Array:
        """[B, L, 3, P] patches -> [B, L, C, P] with positions."""
        def embed(patches: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
            patches = patches.reshape(*patches.shape[:2], self.in_channels, -1)
            z = channel_linear(self.weights["pixel_embedder"]["proj"], patches)
            return z + join_positions(row[0], column[0], self.patch_size).astype(z.dtype)

        parts = position_parts(grid, self.patch_size, self.pixel_hidden_size)
        return from_tiles(self.tile_rows * grid[1], embed, patches.reshape(*patches.shape[:2], -1),
                          *(part[None] for part in parts))

    def _patches(self, x, grid) -> jax.Array:
        """Pictures [B, H, W, 3] -> [B, L, 3, P] in the dtype of the arithmetic."""
        def cut(x: jax.Array) -> jax.Array:
            x = x.reshape(x.shape[0], -1, *x.shape[-2:]).astype(self.dtype)
            patches = patchify(x, self.patch_size)
            # An axis of 3 before the last, and one of 16 at the end, would be padded on a TPU.
            return patches.reshape(x.shape[0], -1, grid[1], self.in_channels * self.patch_size**2)

        rows = self._rows_placed(x).reshape(x.shape[0], grid[0], self.patch_size, *x.shape[2:])
        return from_tiles(self.tile_rows, cut, rows).reshape(
            x.shape[0], -1, self.in_channels, self.patch_size**2)

    def _picture(self, z, grid) -> jax.Array:
        """[B, L, C, P] -> [B, H, W, 3] float32."""
        final, (rows, columns) = self.weights["final_layer"], grid

        def join(z: jax.Array) -> jax.Array:
            z = z.reshape(z.shape[0], -1, *z.shape[-2:])
            out = channel_linear(final["linear"], rms_norm(final["norm"], z, axis=-2))
            grid = out.shape[1] // columns, columns
            pictures = unpatchify(out.astype(jnp.float32), grid, self.patch_size)
            return pictures.reshape(z.shape[0], grid[0], self.patch_size, *pictures.shape[2:])

        z = z.reshape(z.shape[0], rows, columns, *z.shape[-2:])
        pictures = from_tiles(self.tile_rows, join, z)
        return pictures.reshape(z.shape[0], rows * self.patch_size, *pictures.shape[3:])


def _on_image(injection: Injection | None) -> Injection | None:
    """The injection, acting on the image half of an (image, text) stream."""
    if injection is None:
        return None
    return injection._replace(apply=lambda params, stream, inputs: (
        injection.apply(params, stream[0], inputs), stream[1]))


def joint_key_mask(mask: jax.Array, text_length: int, image_length: int) -> jax.Array:
    """The reference's key mask [B, text + image] of the joint attention, True = attended.

    It marks the text tokens whose entry in `mask` [B, L] is False, and no image token.
    """
    image = jnp.zeros((mask.shape[0], image_length), bool)
    return jnp.concatenate([~mask[:, :text_length], image], axis=1)


def check_options(net: PixelDiT) -> None:
    """Raises UserError for options that no network can have."""
    _check(net.in_channels == 3, f"in_channels is {net.in_channels}, but images have 3 channels")
    for name in ("hidden_size", "patch_depth", "pixel_depth", "patch_size", "pixel_hidden_size",
                 "pixel_attn_hidden_size", "txt_embed_dim", "txt_max_length", "pit_chunks",
                 "unroll"):
        _check(getattr(net, name) >= 1, f"{name} is {getattr(net, name)}; it must be at least 1")
    check_heads("hidden_size", net.hidden_size, "num_groups", net.num_groups)
    check_heads("pixel_attn_hidden_size", net.pixel_attn_hidden_size, "pixel_num_groups",
                net.pixel_num_groups)
    _check(net.pixel_hidden_size % 4 == 0,
           f"pixel_hidden_size is {net.pixel_hidden_size}; it must be a multiple of 4")
    _check(net.text_rope_theta > 0,
           f"text_rope_theta is {net.text_rope_theta}; it must be above 0")
    for name, choices in (("rope_mode", ROPE_MODES), ("remat", REMAT_POLICIES)):
        value = getattr(net, name)
        _check(value in choices, f"{name} is {value!r}; choose one of {', '.join(choices)}")
    if net.rope_mode == "ntk_aware":
        heads = (net.hidden_size // net.num_groups,
                 net.pixel_attn_hidden_size // net.pixel_num_groups)
        _check(min(heads) > 4, f"rope_mode ntk_aware needs heads of at least 8 channels; they have "
                               f"{heads[0]} (patch blocks) and {heads[1]} (pixel blocks)")
        _check(min(net.rope_ref_h, net.rope_ref_w) >= net.patch_size,
               f"rope_ref_h x rope_ref_w is {net.rope_ref_h} x {net.rope_ref_w} pixels; each must "
               f"be at least patch_size ({net.patch_size})")
    if net.enable_ed:
        compression.check_options(net)


def check_heads(width_name: str, width: int, heads_name: str, heads: int) -> None:
    """Raises UserError unless heads divide the width into heads of a multiple of 4 channels."""
    _check(heads >= 1 and width % heads == 0,
           f"{heads_name} is {heads}, which does not divide {width_name} {width}; choose a number "
           f"of heads that does")
    _check(width // heads % 4 == 0,
           f"{width_name} {width} / {heads_name} {heads} gives heads of {width // heads} channels; "
           f"the rotary embedding needs a multiple of 4")


def check_inputs(net: PixelDiT, x: jax.Array, t: jax.Array, y: jax.Array,
                 mask: jax.Array | None, feature_indices: tuple[int, ...], early: bool) -> None:
    """Raises UserError for inputs that do not fit the network."""
    _check(x.ndim == 4 and x.shape[-1] == 3,
           f"images have shape {x.shape}; expected [batch, height, width, 3]")
    height, width = x.shape[1:3]
    _check(height % net.patch_size == 0 and width % net.patch_size == 0,
           f"image size {height} x {width} is not a multiple of patch_size {net.patch_size}; "
           f"crop or resize it")
    _check(y.ndim == 3 and y.shape[-1] == net.txt_embed_dim,
           f"caption embeddings have shape {y.shape}; expected [batch, tokens, "
           f"{net.txt_embed_dim}] (txt_embed_dim): use the text encoder the network was made for")
    _check(t.shape == y.shape[:1] == x.shape[:1],
           f"t has shape {t.shape} for {x.shape[0]} images and {y.shape[0]} captions; expected one "
           f"time and one caption per image")
    _check(all(0 <= k < net.patch_depth for k in feature_indices),
           f"feature_indices are {tuple(feature_indices)}; the patch blocks are 0 to "
           f"{net.patch_depth - 1}")
    _check(feature_indices or not early,
           "return_features_early needs feature_indices to say which blocks to return")
    if mask is not None:
        _check_mask(net, mask, (height // net.patch_size) * (width // net.patch_size), y.shape[1])


def _check_mask(net: PixelDiT, mask: jax.Array, patches: int, text_length: int) -> None:
    _check(mask.dtype == bool and mask.ndim == 2 and mask.shape[1] == patches,
           f"mask is {mask.dtype} of shape {mask.shape}; expected bool [batch, {patches}], one "
           f"entry a patch")
    text_length = min(text_length, net.txt_max_length)
    _check(patches >= text_length,
           f"mask has {patches} entries, but its first {text_length} speak of the text tokens; "
           f"leave it out for images this small")


def _check(ok: bool, sentence: str) -> None:
    if not ok:
        raise UserError(sentence)
