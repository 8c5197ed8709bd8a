"""Class-conditional PixelDiT (arXiv 2511.20645, section 3): ImageNet's network.

Differs from the text-to-image network: one stream of patch tokens; time runs from 0 (noise) to 1
(clean) and enters unscaled; the class is an embedding added to the time's; the pixel blocks attend
at the width of the patch blocks; all modulations start at zero.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pid_jax.errors import UserError
from pid_jax.models import repa
from pid_jax.models.attention import Attention, dense_attention
from pid_jax.models.blocks import (ClassContext, PixelContext, channel_linear, class_block,
                                   class_block_init, pixel_block, pixel_block_init,
                                   post_modulated_pixel_block)
from pid_jax.models.layers import (Params, draw, linear, linear_init, linear_spec, norm_init,
                                   normal, patchify, pixel_positions, rms_norm, time_embedding,
                                   time_init, to_grid, unpatchify, xavier_uniform, zeros)
from pid_jax.models.outputs import NetOutput
from pid_jax.models.pixeldit import check_heads
from pid_jax.models.placement import TOKENS, Constrain, unconstrained
from pid_jax.models.rope import RopeTable, image_rope
from pid_jax.models.shell import Init, Shell
from pid_jax.models.stacking import REMAT_POLICIES, run_blocks, stacked_init

ROPE_MODES = ("original", "extrapolated")


class ClassPixelDiT(Shell):
    """Class-conditional PixelDiT; option names are the reference's, defaults are XL's.

    Beyond them: `rope_mode` ("original": positions span 16 on any grid; "extrapolated": they span
    the grid), `label_init_std` and `time_init_std` (of the first label embeddings and of the time
    MLP's kernels; narrow networks learn classes faster with larger ones), `repa_features` (width
    of the frozen features of the alignment; 0: no projector) and `repa_width` (of the projector's
    hidden layers), and `dtype`, `param_dtype`, `remat`, `unroll`, `attention`, `constrain` as in
    `PixelDiT`.
    """

    in_channels: int = 3
    num_groups: int = 16
    hidden_size: int = 1152
    pixel_hidden_size: int = 16
    patch_depth: int = 26
    pixel_depth: int = 4
    patch_size: int = 16
    num_classes: int = 1000
    use_pixel_abs_pos: bool = True
    pit_adaln_post_modulation: bool = False
    rope_mode: str = "original"
    label_init_std: float = 0.02
    time_init_std: float = 0.02
    repa_features: int = 0
    repa_width: int = 1152
    dtype: Any = jnp.float32
    remat: str = "none"
    unroll: int = 1
    attention: Attention = dense_attention
    constrain: Constrain = unconstrained

    def __post_init__(self):
        super().__post_init__()
        check_options(self)

    @property
    def pixel_num_groups(self) -> int:
        """Heads of the pixel blocks' attention."""
        return self.num_groups

    @property
    def null_label(self) -> int:
        """The label that means "no class"."""
        return self.num_classes

    def parameter_inits(self) -> dict[str, Init]:
        """The parameter tree: top-level name -> initialiser of a PRNG key."""
        hidden, pixel, patch = self.hidden_size, self.pixel_hidden_size, self.patch_size
        colours = self.in_channels
        pixel_init = functools.partial(
            pixel_block_init, hidden=hidden, channels=pixel, pixels=patch**2, attn_width=hidden,
            heads=self.num_groups, modulations=4 if self.pit_adaln_post_modulation else 6)
        inits = {
            "t_embedder": functools.partial(time_init, hidden=hidden, std=self.time_init_std),
            "s_embedder": lambda key: {"proj": linear_init(
                key, colours * patch**2, hidden, kernel=xavier_uniform, zero_bias=True)},
            "y_embedder": lambda key: {
                "embedding": normal(self.label_init_std)(key, (self.num_classes + 1, hidden))},
            "patch_blocks": stacked_init(_still(functools.partial(
                class_block_init, hidden=hidden, heads=self.num_groups)), self.patch_depth),
            "pixel_embedder": functools.partial(draw, specs={"proj": linear_spec(colours, pixel)}),
            "pixel_blocks": stacked_init(_still(pixel_init), self.pixel_depth),
            "final_layer": lambda key: {"norm": norm_init(pixel), "linear": linear_init(
                key, pixel, colours, kernel=zeros, zero_bias=True)},
        }
        return inits | repa.parameter_inits(hidden, self.repa_width, self.repa_features)

    def __call__(self, x: jax.Array, t: jax.Array, y: jax.Array,
                 feature_indices: tuple[int, ...] = (),
                 patch_tokens: jax.Array | None = None) -> NetOutput:
        """Predicts the velocity, clean picture minus noise.

        Args:
          x: [B, H, W, 3] float32 in the range of [-1, 1] pictures plus noise; H and W multiples
            of `patch_size`.
          t: [B] float32 in [0, 1]; 0 is noise, 1 is clean.
          y: [B] int, labels 0 .. num_classes - 1, or `null_label`.
          feature_indices: 0-based patch blocks whose tokens are returned as `features`.
          patch_tokens: [B, L, D], the patch tokens of an earlier call (its last block's feature,
            flattened): only the pixel blocks run then.
        """
        check_inputs(self, x, t, y, feature_indices)
        grid = (x.shape[1] // self.patch_size, x.shape[2] // self.patch_size)
        patches = self.constrain(patchify(x.astype(self.dtype), self.patch_size), TOKENS)
        t_emb = time_embedding(self.weights["t_embedder"], t, self.dtype)[:, None]
        self.sow("intermediates", "t_embedder", t_emb[:, 0])
        found = {}
        if patch_tokens is None:
            patch_tokens, found = self._patch_path(patches, t_emb, y, grid, feature_indices)
        condition = jax.nn.silu(t_emb + patch_tokens.astype(self.dtype))
        out = self._pixel_path(patches, condition, grid)
        return NetOutput(out, tuple(to_grid(found[k], grid) for k in sorted(found)))

    def _patch_path(self, patches, t_emb, y, grid, feature_indices):
        """Tokens after the patch blocks, and {block: tokens} at the wanted ones."""
        tokens = linear(self.weights["s_embedder"]["proj"], patches.reshape(*patches.shape[:2], -1))
        self.sow("intermediates", "s_embedder", tokens)
        label = self.weights["y_embedder"]["embedding"][y].astype(self.dtype)[:, None]
        context = ClassContext(self.num_groups, jax.nn.silu(t_emb + label), self._rope(grid),
                               self.attention)
        taps = tuple(sorted(set(feature_indices)))
        result = run_blocks(
            lambda params, s: self.constrain(class_block(params, s, context), TOKENS),
            self.weights["patch_blocks"], self.constrain(tokens, TOKENS), taps=taps,
            remat=self.remat, collect=self.is_mutable_collection("intermediates"),
            unroll=self.unroll)
        self.sow("intermediates", "patch_blocks", result.collected)
        return result.stream, dict(zip(taps, result.taps))

    def _rope(self, grid: tuple[int, int]) -> RopeTable:
        return image_rope(self.hidden_size // self.num_groups, grid, self.rope_mode)

    def _pixel_path(self, patches, condition, grid) -> jax.Array:
        """[B, L, 3, P] patches and [B, L, D] conditions -> [B, H, W, 3] float32."""
        z = channel_linear(self.weights["pixel_embedder"]["proj"], patches)
        if self.use_pixel_abs_pos:
            z = z + pixel_positions(grid, self.patch_size, self.pixel_hidden_size).astype(z.dtype)
        self.sow("intermediates", "pixel_embedder", z)
        context = PixelContext(self.num_groups, condition, self._rope(grid), self.attention, None)
        block = post_modulated_pixel_block if self.pit_adaln_post_modulation else pixel_block
        result = run_blocks(
            lambda params, z: self.constrain(block(params, z, context), TOKENS),
            self.weights["pixel_blocks"], self.constrain(z, TOKENS),
            remat=self.remat, collect=self.is_mutable_collection("intermediates"),
            unroll=self.unroll)
        self.sow("intermediates", "pixel_blocks", result.collected)
        final = self.weights["final_layer"]
        out = channel_linear(final["linear"], rms_norm(final["norm"], result.stream, axis=-2))
        return unpatchify(out.astype(jnp.float32), grid, self.patch_size)


def _still(init: Init) -> Init:
    """A block's initialiser whose modulations start at zero."""
    def still(key: jax.Array) -> Params:
        params = init(key)
        return params | {"adaLN_modulation": jax.tree.map(jnp.zeros_like,
                                                          params["adaLN_modulation"])}

    return still


def check_options(net: ClassPixelDiT) -> None:
    """Raises UserError for options that no network can have."""
    _check(net.in_channels == 3, f"in_channels is {net.in_channels}, but images have 3 channels")
    for name in ("hidden_size", "patch_depth", "pixel_depth", "patch_size", "pixel_hidden_size",
                 "num_classes", "repa_width", "unroll"):
        _check(getattr(net, name) >= 1, f"{name} is {getattr(net, name)}; it must be at least 1")
    _check(net.repa_features >= 0,
           f"repa_features is {net.repa_features}; it must be 0 (no alignment) or a width")
    check_heads("hidden_size", net.hidden_size, "num_groups", net.num_groups)
    _check(net.pixel_hidden_size % 4 == 0,
           f"pixel_hidden_size is {net.pixel_hidden_size}; it must be a multiple of 4")
    for name, choices in (("rope_mode", ROPE_MODES), ("remat", REMAT_POLICIES)):
        value = getattr(net, name)
        _check(value in choices, f"{name} is {value!r}; choose one of {', '.join(choices)}")


def check_inputs(net: ClassPixelDiT, x: jax.Array, t: jax.Array, y: jax.Array,
                 feature_indices: tuple[int, ...]) -> None:
    """Raises UserError for inputs that do not fit the network."""
    _check(x.ndim == 4 and x.shape[-1] == 3,
           f"images have shape {x.shape}; expected [batch, height, width, 3]")
    height, width = x.shape[1:3]
    _check(height % net.patch_size == 0 and width % net.patch_size == 0,
           f"image size {height} x {width} is not a multiple of patch_size {net.patch_size}; "
           f"crop or resize it")
    _check(t.shape == y.shape == x.shape[:1],
           f"t has shape {t.shape} and y {y.shape} for {x.shape[0]} images; expected one time and "
           f"one label per image")
    _check(jnp.issubdtype(y.dtype, jnp.integer), f"labels are {y.dtype}; expected whole numbers")
    _check(all(0 <= k < net.patch_depth for k in feature_indices),
           f"feature_indices are {tuple(feature_indices)}; the patch blocks are 0 to "
           f"{net.patch_depth - 1}")


def _check(ok: bool, sentence: str) -> None:
    if not ok:
        raise UserError(sentence)
