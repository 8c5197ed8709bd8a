"""The low-quality (LQ) branch of PiD: from latent and image to one feature per injection point.

PiD, arXiv 2605.23902. A latent is brought to the patch grid (nearest, bilinear or folded),
convolved by a stem and ResBlocks, merged with an optional image branch, and read by linear heads.
"""

from fractions import Fraction

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from pid_jax.models.gates import init_gates
from pid_jax.models.lq_checks import check_inputs, check_projection
from pid_jax.models.spatial import (channels_to_space, pad_border, resize_bilinear,
                                    resize_nearest, space_to_channels)

# torch cuts its truncated normal at +-2, a hundred standard deviations away.
conv_init = nn.initializers.normal(0.02)


@flax.struct.dataclass
class LqFeatures:
    """What the LQ branch hands to the network.

    `tokens [N, B, L, D]`: one feature per injection point; `pit [B, L, D]` or None: the feature of
    the pixel blocks; `rgb [B, h, w, 3]` or None: the auxiliary reconstruction, unclamped;
    `gates`: parameters of the N gates (`models.gates`), stacked.
    """

    tokens: jax.Array
    pit: jax.Array | None
    rgb: jax.Array | None
    gates: dict


class ResBlock(nn.Module):
    """GroupNorm(4)-SiLU-Conv3 twice, added to the input; `[B, h, w, C]` to the same shape."""

    padding_mode: str
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        h = x
        for i in (1, 2):
            h = nn.GroupNorm(4, epsilon=1e-5, use_fast_variance=False, name=f"norm{i}", **dtypes)(h)
            h = conv3(nn.silu(h), x.shape[-1], self.padding_mode, f"conv{i}", dtypes)
        return x + h


def conv3(x: jax.Array, width: int, padding_mode: str, name: str, dtypes: dict) -> jax.Array:
    """A 3x3 convolution to `width` channels that keeps the grid; for use inside a module."""
    conv = nn.Conv(width, (3, 3), padding="VALID", kernel_init=conv_init, name=name, **dtypes)
    return conv(pad_border(x, 1, padding_mode))


class ConvBranch(nn.Module):
    """Conv3-SiLU-Conv3 and ResBlocks; returns the states after the stem and after each block."""

    width: int
    num_res_blocks: int
    padding_mode: str
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> list[jax.Array]:
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        h = nn.silu(conv3(x, self.width, self.padding_mode, "conv_in", dtypes))
        states = [conv3(h, self.width, self.padding_mode, "conv_out", dtypes)]
        for i in range(self.num_res_blocks):
            block = ResBlock(self.padding_mode, name=f"res_block_{i}", **dtypes)
            states.append(block(states[-1]))
        return states


class Merge(nn.Module):
    """[image, latent] features `[B, h, w, C]` each: Conv1-SiLU-ResBlocks to `[B, h, w, C]`."""

    num_res_blocks: int
    padding_mode: str
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, image: jax.Array, latent: jax.Array) -> jax.Array:
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        conv = nn.Conv(image.shape[-1], (1, 1), kernel_init=conv_init, name="conv", **dtypes)
        h = nn.silu(conv(jnp.concatenate([image, latent], axis=-1)))
        for i in range(self.num_res_blocks):
            h = ResBlock(self.padding_mode, name=f"res_block_{i}", **dtypes)(h)
        return h


class AuxRgbHead(nn.Module):
    """Features `[B, h, w, C]` to a small picture `[B, h * cell, w * cell, 3]` (training aid)."""

    cell: int
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, features: jax.Array) -> jax.Array:
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        h = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name="norm", **dtypes)(features)
        h = nn.Dense(features.shape[-1], kernel_init=conv_init, name="hidden", **dtypes)(h)
        h = nn.Dense(3 * self.cell**2, kernel_init=conv_init, name="out", **dtypes)(nn.silu(h))
        return channels_to_space(h, self.cell)


class LqProjection(nn.Module):
    """LQ latent and/or LQ image to the features that PidNet injects.

    Attributes (reference names without `lq_`):
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
    """

    out_dim: int
    hidden_dim: int
    num_outputs: int
    patch_size: int
    sr_scale: int
    latent_spatial_down_factor: int
    in_channels: int = 0
    latent_channels: int = 16
    num_res_blocks: int = 4
    latent_unpatchify_factor: int = 1
    aux_rgb_head: bool = False
    aux_rgb_head_latent_block_idx: int = -1
    conv_padding_mode: str = "zeros"
    gate_type: str = "sigma_aware_per_token_per_dim"
    zero_init: bool = True
    pit_output: bool = False
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    def __post_init__(self):
        check_projection(self)
        super().__post_init__()

    @property
    def ratio(self) -> Fraction:
        """Tokens per latent cell along one axis (after unpatchifying)."""
        cell = self.latent_spatial_down_factor // self.latent_unpatchify_factor
        return Fraction(self.sr_scale * cell, self.patch_size)

    @property
    def rgb_cell(self) -> int:
        """LQ pixels per token along one axis."""
        return self.patch_size // self.sr_scale

    @nn.compact
    def __call__(self, grid: tuple[int, int], lq_latent: jax.Array | None = None,
                 lq_image: jax.Array | None = None, lq_mask: jax.Array | None = None,
                 with_rgb: bool = False) -> LqFeatures:
        """Computes the features on the patch grid.

        Args:
          grid: rows and columns of patches of the output image.
          lq_latent: `[B, h, w, latent_channels]`, any h and w; None leaves the branch out.
          lq_image: `[B, H, W, in_channels]` in [-1, 1], any size; None leaves the branch out.
          lq_mask: `[B]`, multiplies the outputs of the heads (0 drops a sample's features).
          with_rgb: also run the auxiliary head.
        Raises UserError for inputs that the network has no branch or no parameters for.
        """
        check_inputs(self, lq_latent, lq_image, lq_mask, with_rgb)
        if self.is_initializing():
            lq_latent, lq_image = self._every_input(grid, lq_latent, lq_image)
        latent = None if lq_latent is None else self._latent_branch(grid, lq_latent)
        image = None if lq_image is None else self._image_branch(grid, lq_image)
        shared = self._merge(image, latent)
        tokens, pit = self._heads(shared, lq_mask)
        rgb = self._aux_rgb(shared, latent) if with_rgb or self.is_initializing() else None
        gates = self.param("gate_modules", init_gates, self.num_outputs, self.out_dim,
                           self.gate_type, self.param_dtype)
        return LqFeatures(tokens, pit, rgb, gates)

    def _every_input(self, grid, lq_latent, lq_image):
        """Fills a missing input with zeros, so that initialisation makes every parameter."""
        given = lq_latent if lq_latent is not None else lq_image
        batch = 1 if given is None else given.shape[0]
        if lq_latent is None and self.latent_channels:
            lq_latent = jnp.zeros((batch, *grid, self.latent_channels), self.dtype)
        if lq_image is None and self.in_channels:
            lq_image = jnp.zeros((batch, *grid, self.in_channels), self.dtype)
        return lq_latent, lq_image

    def _branch(self, name: str) -> ConvBranch:
        return ConvBranch(self.hidden_dim, self.num_res_blocks, self.conv_padding_mode, self.dtype,
                          self.param_dtype, name=name)

    def _latent_branch(self, grid, lq_latent):
        aligned = align_latent(lq_latent, grid, self.latent_unpatchify_factor, self.ratio)
        return self._branch("latent_proj")(aligned.astype(self.dtype))

    def _image_branch(self, grid, lq_image):
        size = (grid[0] * self.rgb_cell, grid[1] * self.rgb_cell)
        cells = space_to_channels(resize_bilinear(lq_image, size), self.rgb_cell)
        return self._branch("image_conv")(cells.astype(self.dtype))[-1]

    def _merge(self, image, latent):
        if image is None:
            return latent[-1]
        if latent is None:
            return image
        merge = Merge(self.num_res_blocks, self.conv_padding_mode, self.dtype, self.param_dtype,
                      name="merge")
        return merge(image, latent[-1])

    def _heads(self, shared, lq_mask):
        batch, height, width, _ = shared.shape
        flat = shared.reshape(batch, height * width, self.hidden_dim)
        heads = self.param("output_heads", init_heads, self.num_outputs, *self._head_args())
        tokens = _linear(heads, flat, "bli,nio->nblo", lq_mask)
        if not self.pit_output:
            return tokens, None
        head = self.param("pit_head", init_head, *self._head_args())
        return tokens, _linear(head, flat, "bli,io->blo", lq_mask)

    def _head_args(self):
        return self.hidden_dim, self.out_dim, self.zero_init, self.param_dtype

    def _aux_rgb(self, shared, latent):
        if not self.aux_rgb_head:
            return None
        tap = self.aux_rgb_head_latent_block_idx
        head = AuxRgbHead(self.rgb_cell, self.dtype, self.param_dtype, name="lq_aux_rgb_head")
        return head(shared if tap == -1 else latent[tap])


def init_head(key, dim_in: int, dim_out: int, zero: bool, param_dtype) -> dict:
    """One linear head: kernel `[dim_in, dim_out]` of zeros or N(0, 0.02^2), bias of zeros."""
    init = nn.initializers.zeros if zero else conv_init
    return {"kernel": init(key, (dim_in, dim_out), param_dtype),
            "bias": jnp.zeros((dim_out,), param_dtype)}


def init_heads(key, count: int, *head_args) -> dict:
    """`count` heads stacked on a new leading axis; `head_args` as in `init_head`."""
    return jax.vmap(lambda k: init_head(k, *head_args))(jax.random.split(key, count))


def _linear(head: dict, x: jax.Array, product: str, mask: jax.Array | None) -> jax.Array:
    """A head, or all stacked heads at once, then the mask; `product` is the einsum."""
    out = jnp.einsum(product, x, head["kernel"].astype(x.dtype))
    out = out + head["bias"].astype(x.dtype)[..., None, None, :]
    return out if mask is None else out * mask.astype(x.dtype)[:, None, None]


def align_latent(latent: jax.Array, grid: tuple[int, int], unpatchify: int,
                 ratio: Fraction) -> jax.Array:
    """Brings a latent to the patch grid.

    Args:
      latent: `[B, h, w, C]`.
      grid: (rows, columns) of tokens.
      unpatchify: side of the cells unfolded from the channels first, 1 for none.
      ratio: tokens per latent cell. Above 1: nearest; 1: bilinear if sizes differ; below 1: bilinear
        to whole cells if sizes differ, then cells folded into channels (channel, row, column).
    Returns: `[B, rows, columns, C / unpatchify**2 / min(ratio, 1)**2]`.
    """
    if unpatchify > 1:
        latent = channels_to_space(latent, unpatchify)
    if ratio > 1:
        return resize_nearest(latent, grid)
    fold = int(1 / ratio)
    latent = resize_bilinear(latent, (grid[0] * fold, grid[1] * fold))
    return space_to_channels(latent, fold)
