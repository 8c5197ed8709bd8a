"""The low-quality (LQ) branch of PiD: from latent and image to features for every injection point.

PiD, arXiv 2605.23902. A latent is brought to the patch grid (nearest, bilinear or folded),
convolved by a stem and ResBlocks, merged with an optional image branch, and read by linear heads.
"""

import dataclasses
import functools
from fractions import Fraction
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from pid_jax.models.convolution import affine_init, conv, conv_init, group_norm, layer_norm
from pid_jax.models.gates import gate_init
from pid_jax.models.layers import Params, linear, linear_init, normal, zeros
from pid_jax.models.lq_checks import check_inputs, check_projection
from pid_jax.models.placement import ROWS, Constrain, unconstrained
from pid_jax.models.spatial import (channels_to_space, pad_border, resize_bilinear,
                                    resize_nearest, space_to_channels)
from pid_jax.models.stacking import stacked_init

# torch cuts its truncated normal at +-2, a hundred standard deviations away.
small_normal = normal(0.02)


@flax.struct.dataclass
class LqTokens:
    """What the convolutions of the LQ branch give; `read_head` makes the features from it."""

    # [B, L, hidden_dim] on the patch grid.
    shared: jax.Array
    # [B, h, w, 3]: auxiliary reconstruction of the LQ image, unclamped, when asked for.
    rgb: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class LqProjection:
    """LQ latent and/or LQ image to the tokens whose heads PidNet injects.

    Attributes (the reference's options without `lq_`):
      out_dim: width of the token stream; hidden_dim: width of the convolutions, a multiple of 4.
      num_outputs: injection points; pit_output: one more head for the pixel blocks.
      in_channels: channels of the LQ image, 0 for no image branch; latent_channels: of the latent
        as the codec gives it, 0 for no latent branch.
      num_res_blocks: of each branch and of the merge.
      latent_unpatchify_factor: cells of this side are unfolded from the latent's channels first.
      aux_rgb_head, aux_rgb_head_latent_block_idx: the auxiliary head, and the ResBlock (1-based) of
        the latent branch that it reads; -1 for the features after the merge.
      conv_padding_mode: see `spatial.pad_border`; gate_type: see `gates.GATE_TYPES`.
      zero_init: heads start at zero, so that the network starts as its backbone.
      sr_scale: output pixels per LQ pixel; latent_spatial_down_factor: LQ pixels per latent cell;
      patch_size: output pixels per token.
    Raises UserError for options that do not fit together.
    """

    out_dim: int
    hidden_dim: int
    num_outputs: int
    patch_size: int
    sr_scale: int
    latent_spatial_down_factor: int
    in_channels: int
    latent_channels: int
    num_res_blocks: int
    latent_unpatchify_factor: int
    aux_rgb_head: bool
    aux_rgb_head_latent_block_idx: int
    conv_padding_mode: str
    gate_type: str
    zero_init: bool
    pit_output: bool
    dtype: Any = jnp.float32
    constrain: Constrain = unconstrained

    def __post_init__(self):
        check_projection(self)

    @property
    def ratio(self) -> Fraction:
        """Tokens per latent cell along one axis (after unpatchifying)."""
        cell = self.latent_spatial_down_factor // self.latent_unpatchify_factor
        return Fraction(self.sr_scale * cell, self.patch_size)

    @property
    def rgb_cell(self) -> int:
        """LQ pixels per token along one axis."""
        return self.patch_size // self.sr_scale

    @property
    def latent_stem_channels(self) -> int:
        """Channels of the latent once it lies on the patch grid."""
        fold = int(max(1, 1 / self.ratio))
        return self.latent_channels // self.latent_unpatchify_factor**2 * fold**2

    def init(self, key: jax.Array) -> dict:
        """Parameters of the branches, heads and gates, float32."""
        return {name: init(k) for (name, init), k in zip(
            self._inits().items(), jax.random.split(key, len(self._inits())))}

    def _inits(self) -> dict:
        branch = functools.partial(branch_init, width=self.hidden_dim, blocks=self.num_res_blocks)
        head = functools.partial(head_init, n_in=self.hidden_dim, n_out=self.out_dim,
                                 zero=self.zero_init)
        gate = functools.partial(gate_init, dim=self.out_dim, gate_type=self.gate_type)
        inits = {"output_heads": stacked_init(head, self.num_outputs),
                 "gate_modules": stacked_init(gate, self.num_outputs)}
        if self.latent_channels:
            inits["latent_proj"] = functools.partial(branch, n_in=self.latent_stem_channels)
        if self.in_channels:
            inits["image_conv"] = functools.partial(branch,
                                                    n_in=self.in_channels * self.rgb_cell**2)
        if self.latent_channels and self.in_channels:
            inits["merge"] = functools.partial(merge_init, width=self.hidden_dim,
                                               blocks=self.num_res_blocks)
        if self.pit_output:
            inits["pit_head"] = head
        if self.aux_rgb_head:
            inits["lq_aux_rgb_head"] = functools.partial(aux_init, width=self.hidden_dim,
                                                         cell=self.rgb_cell)
        return inits

    def __call__(self, params: Params, grid: tuple[int, int], lq_latent: jax.Array | None = None,
                 lq_image: jax.Array | None = None, with_rgb: bool = False) -> LqTokens:
        """Runs the convolutions.

        Args:
          params: as `init` makes them.
          grid: rows and columns of patches of the output image.
          lq_latent: `[B, h, w, latent_channels]`, any h and w; None leaves the branch out.
          lq_image: `[B, H, W, in_channels]` in [-1, 1], any size; None leaves the branch out.
          with_rgb: also run the auxiliary head.
        Raises UserError for inputs that the network has no branch or no parameters for.
        """
        check_inputs(self, lq_latent, lq_image, with_rgb)
        latent = None if lq_latent is None else self._latent_states(params, grid, lq_latent)
        image = None if lq_image is None else self._image_state(params, grid, lq_image)
        shared = self._merge(params, image, latent)
        return LqTokens(shared.reshape(shared.shape[0], -1, self.hidden_dim),
                        self._rgb(params, shared, latent) if with_rgb else None)

    def _latent_states(self, params, grid, lq_latent):
        aligned = align_latent(lq_latent, grid, self.latent_unpatchify_factor, self.ratio)
        return self._branch(params["latent_proj"], aligned)

    def _image_state(self, params, grid, lq_image):
        size = (grid[0] * self.rgb_cell, grid[1] * self.rgb_cell)
        cells = space_to_channels(resize_bilinear(lq_image, size), self.rgb_cell)
        return self._branch(params["image_conv"], cells)[-1]

    def _branch(self, params, x):
        x = self.constrain(x.astype(self.dtype), ROWS)
        return [self.constrain(state, ROWS) for state in branch(params, x, self.conv_padding_mode)]

    def _merge(self, params, image, latent):
        if image is None:
            return latent[-1]
        if latent is None:
            return image
        return self.constrain(
            merge(params["merge"], image, latent[-1], self.conv_padding_mode), ROWS)

    def _rgb(self, params, shared, latent):
        tap = self.aux_rgb_head_latent_block_idx
        features = shared if tap == -1 else latent[tap]
        return aux_rgb(params["lq_aux_rgb_head"], features, self.rgb_cell)


def align_latent(latent: jax.Array, grid: tuple[int, int], unpatchify: int,
                 ratio: Fraction) -> jax.Array:
    """Brings a latent to the patch grid.

    Args:
      latent: `[B, h, w, C]`.
      grid: (rows, columns) of tokens.
      unpatchify: side of the cells unfolded from the channels first, 1 for none.
      ratio: tokens per latent cell. Above 1: nearest; 1: bilinear if sizes differ; below 1:
        bilinear to whole cells if sizes differ, then cells folded into channels (channel, row,
        column).
    Returns: `[B, rows, columns, C / unpatchify**2 / min(ratio, 1)**2]`.
    """
    latent = channels_to_space(latent, unpatchify)
    if ratio > 1:
        return resize_nearest(latent, grid)
    fold = int(1 / ratio)
    latent = resize_bilinear(latent, (grid[0] * fold, grid[1] * fold))
    return space_to_channels(latent, fold)


# ---- convolutional parts ------------------------------------------------------------------------

def small_conv_init(key: jax.Array, size: int, n_in: int, n_out: int) -> dict:
    """A convolution of N(0, 0.02^2) with zero bias."""
    return conv_init(key, size, n_in, n_out, kernel=small_normal, zero_bias=True)


def conv3(params: Params, x: jax.Array, padding_mode: str) -> jax.Array:
    """A 3x3 convolution that keeps the grid."""
    return conv(params, pad_border(x, 1, padding_mode))


def res_block_init(key: jax.Array, width: int) -> dict:
    """Parameters of `res_block`."""
    keys = jax.random.split(key)
    return {"norm1": affine_init(width), "conv1": small_conv_init(keys[0], 3, width, width),
            "norm2": affine_init(width), "conv2": small_conv_init(keys[1], 3, width, width)}


def res_block(params: Params, x: jax.Array, padding_mode: str) -> jax.Array:
    """x + GroupNorm(4)-SiLU-Conv3 twice; `[B, h, w, C]` to the same shape."""
    h = x
    for i in ("1", "2"):
        h = jax.nn.silu(group_norm(params["norm" + i], h, 4))
        h = conv3(params["conv" + i], h, padding_mode)
    return x + h


def _res_blocks_init(key: jax.Array, width: int, blocks: int) -> dict:
    return {f"res_block_{i}": res_block_init(k, width)
            for i, k in enumerate(jax.random.split(key, blocks))}


def _res_block_states(params: Params, x: jax.Array, padding_mode: str) -> list[jax.Array]:
    """x and the states after each ResBlock."""
    states = [x]
    while (name := f"res_block_{len(states) - 1}") in params:
        states.append(res_block(params[name], states[-1], padding_mode))
    return states


def branch_init(key: jax.Array, n_in: int, width: int, blocks: int) -> dict:
    """Parameters of `branch`."""
    keys = jax.random.split(key, 3)
    return {"conv_in": small_conv_init(keys[0], 3, n_in, width),
            "conv_out": small_conv_init(keys[1], 3, width, width),
            **_res_blocks_init(keys[2], width, blocks)}


def branch(params: Params, x: jax.Array, padding_mode: str) -> list[jax.Array]:
    """Conv3-SiLU-Conv3, then ResBlocks: states `[B, h, w, width]` after the stem and each block."""
    h = jax.nn.silu(conv3(params["conv_in"], x, padding_mode))
    return _res_block_states(params, conv3(params["conv_out"], h, padding_mode), padding_mode)


def merge_init(key: jax.Array, width: int, blocks: int) -> dict:
    """Parameters of `merge`."""
    keys = jax.random.split(key)
    return {"conv": small_conv_init(keys[0], 1, 2 * width, width),
            **_res_blocks_init(keys[1], width, blocks)}


def merge(params: Params, image: jax.Array, latent: jax.Array, padding_mode: str) -> jax.Array:
    """Image and latent features `[B, h, w, C]`: Conv1-SiLU-ResBlocks to `[B, h, w, C]`."""
    h = jax.nn.silu(conv(params["conv"], jnp.concatenate([image, latent], axis=-1)))
    return _res_block_states(params, h, padding_mode)[-1]


# ---- heads --------------------------------------------------------------------------------------

def head_init(key: jax.Array, n_in: int, n_out: int, zero: bool) -> dict:
    """A linear head of zeros, or of N(0, 0.02^2) with zero bias."""
    return linear_init(key, n_in, n_out, kernel=zeros if zero else small_normal, zero_bias=True)


def read_head(head: Params, shared: jax.Array, mask: jax.Array | None) -> jax.Array:
    """One injection's feature `[B, L, D]` from `[B, L, hidden_dim]`, times `mask` `[B]`."""
    feature = linear(head, shared)
    return feature if mask is None else feature * mask.astype(feature.dtype)[:, None, None]


def aux_init(key: jax.Array, width: int, cell: int) -> dict:
    """Parameters of `aux_rgb`."""
    keys = jax.random.split(key)
    return {"norm": affine_init(width), "hidden": head_init(keys[0], width, width, zero=False),
            "out": head_init(keys[1], width, 3 * cell**2, zero=False)}


def aux_rgb(params: Params, features: jax.Array, cell: int) -> jax.Array:
    """Features `[B, h, w, C]` to a small picture `[B, h * cell, w * cell, 3]`, float32."""
    h = jax.nn.silu(linear(params["hidden"], layer_norm(params["norm"], features)))
    return channels_to_space(linear(params["out"], h).astype(jnp.float32), cell)
