"""The convolutional auto-encoder of latent diffusion: Flux, SD3, SDXL, Flux2, Qwen-Image (Wan).

Encoder: a convolution, levels of residual blocks that each halve the picture, a middle block with
attention, a convolution to mean and log-variance. The decoder mirrors it (Rombach et al., arXiv
2112.10752). The Qwen-Image VAE, its time axis removed, is the same network with other norms and
with upsampling that halves the channels.
"""

import functools

import jax
import jax.numpy as jnp

from pid_jax.encoders.spatial_ops import GROUPS, Whole, in_bands
from pid_jax.errors import UserError
from pid_jax.models.convolution import affine_init, conv
from pid_jax.models.layers import (Params, draw, linear, linear_spec, norm_init, torch_spec,
                                   unstack)
from pid_jax.models.shell import Init, Shell

QUERY_CHUNK = 1024  # queries of the middle attention at a time


class AutoEncoder(Shell):
    """Pictures to moments and latents to pictures; nothing is sampled or clipped.

    Attributes:
      ch, ch_mult: channels of level i are ch * ch_mult[i]; level 0 is the finest.
      num_res_blocks: of an encoder level; a decoder level has one more.
      z_channels: Z of the latent.
      quant_convs: 1x1 convolutions after the encoder and before the decoder.
      norm: "group" (GroupNorm, 32 groups) or "channel" (RMS over the channels).
      halving_upsample: the convolution after an upsampling halves the channels (Qwen-Image).
      patch: cells of the latent that are one cell of it in the end, along a side. Above 1 the
        parameters hold the mean and variance of the folded latent, as `bn` (Flux2).
    """

    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    z_channels: int = 16
    quant_convs: bool = False
    norm: str = "group"
    halving_upsample: bool = False
    patch: int = 1

    def __post_init__(self):
        super().__post_init__()
        sizes = (self.ch, *self.ch_mult, self.num_res_blocks, self.z_channels, self.patch)
        whole = all(isinstance(size, int) and size > 0 for size in sizes) and self.ch_mult
        if not whole or self.norm == "group" and any(
                self.ch * multiple % GROUPS for multiple in (1, *self.ch_mult)):
            raise UserError(f"no auto-encoder has ch {self.ch}, ch_mult {self.ch_mult}, "
                            f"num_res_blocks {self.num_res_blocks}, z_channels {self.z_channels}; "
                            f"expected whole numbers above 0, levels of whole {GROUPS} groups")

    @property
    def channels(self) -> int:
        """Channels of the folded latent."""
        return self.z_channels * self.patch**2

    @property
    def factor(self) -> int:
        """Pixels of a side of a cell of the folded latent."""
        return 2 ** (len(self.ch_mult) - 1) * self.patch

    def parameter_inits(self) -> dict[str, Init]:
        """`encoder`, `decoder` and, where cells are folded, `bn`."""
        inits = {"encoder": lambda key: draw(key, self._encoder_spec()),
                 "decoder": lambda key: draw(key, self._decoder_spec())}
        if self.patch > 1:
            inits["bn"] = lambda key: {"mean": jnp.zeros((self.channels,)),
                                       "var": jnp.ones((self.channels,))}
        return inits

    def encode(self, images: jax.Array, band: int = 0) -> jax.Array:
        """[B, H, W, 3] in [-1, 1] -> moments [B, H // f, W // f, 2 Z]: mean, then log-variance.

        Args:
          band: rows of a band, even, in which all but the coarsest level run; 0 for no bands.
        """
        params, whole = self.weights["encoder"], Whole()
        x = images
        for i in range(len(self.ch_mult)):
            level = functools.partial(_encode_level, params, i)
            if band and "downsample" in params[f"down_{i}"]:
                x = in_bands(level, x, band, *self._reach())
            else:
                x = level(x, whole)
        return _head(params, _middle(params["mid"], x, whole), whole, "quant_conv")

    def decode(self, latents: jax.Array) -> jax.Array:
        """[B, h, w, Z] -> [B, h f, w f, 3]."""
        params, whole = self.weights["decoder"], Whole()
        if self.quant_convs:
            latents = conv(params["post_quant_conv"], latents)
        x = _middle(params["mid"], whole.conv(params["conv_in"], latents), whole)
        for i in range(len(self.ch_mult)):
            x = _decode_level(params[f"up_{i}"], x, whole)
        return _head(params, x, whole)

    def _reach(self) -> tuple[int, int]:
        """(halo, GroupNorms) of an encoder level: conv_in, two convolutions a block, downsample."""
        return 2 * self.num_res_blocks + 4, 2 * self.num_res_blocks * (self.norm == "group")

    # ---- parameters ------------------------------------------------------------------------------

    def _encoder_spec(self) -> dict:
        widths = [self.ch * m for m in (1, *self.ch_mult)]
        spec: dict = {"conv_in": conv_spec(3, 3, self.ch)}
        for i, (n_in, n_out) in enumerate(zip(widths, widths[1:])):
            level = self._blocks_spec(n_in, n_out, self.num_res_blocks)
            if i < len(self.ch_mult) - 1:
                level["downsample"] = conv_spec(3, n_out, n_out)
            spec[f"down_{i}"] = level
        spec |= self._ends_spec(widths[-1], widths[-1], 2 * self.z_channels)
        if self.quant_convs:
            spec["quant_conv"] = conv_spec(1, 2 * self.z_channels, 2 * self.z_channels)
        return spec

    def _decoder_spec(self) -> dict:
        widths = [self.ch * m for m in reversed(self.ch_mult)]
        spec: dict = {"conv_in": conv_spec(3, self.z_channels, widths[0])}
        n_in = widths[0]
        for i, width in enumerate(widths):
            level = self._blocks_spec(n_in, width, self.num_res_blocks + 1)
            n_in = width
            if i < len(widths) - 1:
                n_in = width // 2 if self.halving_upsample else width
                level["upsample"] = conv_spec(3, width, n_in)
            spec[f"up_{i}"] = level
        spec |= self._ends_spec(widths[0], n_in, 3)
        if self.quant_convs:
            spec["post_quant_conv"] = conv_spec(1, self.z_channels, self.z_channels)
        return spec

    def _ends_spec(self, middle: int, last: int, n_out: int) -> dict:
        return {"mid": {"block_1": self._block_spec(middle, middle),
                        "attention": self._attention_spec(middle),
                        "block_2": self._block_spec(middle, middle)},
                "norm_out": self._norm_spec(last), "conv_out": conv_spec(3, last, n_out)}

    def _blocks_spec(self, n_in: int, n_out: int, count: int) -> dict:
        return {f"block_{j}": self._block_spec(n_in if j == 0 else n_out, n_out)
                for j in range(count)}

    def _block_spec(self, n_in: int, n_out: int) -> dict:
        spec = {"norm1": self._norm_spec(n_in), "conv1": conv_spec(3, n_in, n_out),
                "norm2": self._norm_spec(n_out), "conv2": conv_spec(3, n_out, n_out)}
        return spec if n_in == n_out else spec | {"shortcut": conv_spec(1, n_in, n_out)}

    def _attention_spec(self, width: int) -> dict:
        proj = {"norm": self._norm_spec(width), "proj": linear_spec(width, width)}
        if self.norm == "group":
            return proj | {name: linear_spec(width, width) for name in "qkv"}
        return proj | {"qkv": {"kernel": torch_spec(width, 3, width, width),
                               "bias": torch_spec(width, 3, width)}}

    def _norm_spec(self, width: int) -> dict:
        return affine_init(width) if self.norm == "group" else norm_init(width)


def conv_spec(size: int, n_in: int, n_out: int) -> dict:
    """Parameters of a `size` x `size` convolution, for `draw`."""
    fan = size * size * n_in
    return {"kernel": torch_spec(fan, size, size, n_in, n_out), "bias": torch_spec(fan, n_out)}


# ---- layers --------------------------------------------------------------------------------------

def _encode_level(params: Params, i: int, x: jax.Array, ops: Whole) -> jax.Array:
    """Level i of the encoder; the first one begins with the picture's colours."""
    if i == 0:
        x = ops.conv(params["conv_in"], x)
    level = params[f"down_{i}"]
    x = _blocks(level, x, ops)
    return ops.downsample(level["downsample"], x) if "downsample" in level else x


def _decode_level(level: Params, x: jax.Array, ops: Whole) -> jax.Array:
    x = _blocks(level, x, ops)
    return ops.conv(level["upsample"], double(x)) if "upsample" in level else x


def _blocks(level: Params, x: jax.Array, ops: Whole) -> jax.Array:
    for j in range(sum(name.startswith("block_") for name in level)):
        x = _res_block(level[f"block_{j}"], x, ops)
    return x


def _res_block(params: Params, x: jax.Array, ops: Whole) -> jax.Array:
    """x + conv(silu(norm(conv(silu(norm(x))))), with a 1x1 convolution where channels change."""
    h = ops.conv(params["conv1"], jax.nn.silu(ops.norm(params["norm1"], x)))
    h = ops.conv(params["conv2"], jax.nn.silu(ops.norm(params["norm2"], h)))
    return h + (conv(params["shortcut"], x) if "shortcut" in params else x)


def double(x: jax.Array) -> jax.Array:
    """Every pixel of [B, H, W, C] twice along both sides (nearest neighbour)."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def _middle(params: Params, x: jax.Array, ops: Whole) -> jax.Array:
    x = _res_block(params["block_1"], x, ops)
    x = x + _attention(params["attention"], ops.norm(params["attention"]["norm"], x))
    return _res_block(params["block_2"], x, ops)


def _attention(params: Params, x: jax.Array) -> jax.Array:
    """One head among all cells of [B, h, w, C]."""
    batch, height, width, channels = x.shape
    tokens = x.reshape(batch, height * width, channels)
    layers = unstack(params["qkv"]) if "qkv" in params else [params[name] for name in "qkv"]
    out = chunked_attention(*(linear(layer, tokens) for layer in layers))
    return linear(params["proj"], out).reshape(x.shape)


def chunked_attention(q: jax.Array, k: jax.Array, v: jax.Array,
                      chunk: int = QUERY_CHUNK) -> jax.Array:
    """softmax(q k^T C^-0.5) v for [B, N, C], scores of `chunk` queries in memory at a time."""
    def attend(part: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqc,bkc->bqk", part, k, preferred_element_type=jnp.float32)
        return jnp.einsum("bqk,bkc->bqc", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)

    q = q * q.shape[-1] ** -0.5
    batch, length, channels = q.shape
    if length <= chunk:
        return attend(q)
    padded = jnp.pad(q, ((0, 0), (0, -length % chunk), (0, 0)))
    parts = jnp.moveaxis(padded.reshape(batch, -1, chunk, channels), 1, 0)
    out = jnp.moveaxis(jax.lax.map(attend, parts), 0, 1)
    return out.reshape(batch, -1, channels)[:, :length]


def _head(params: Params, x: jax.Array, ops: Whole, last: str = "") -> jax.Array:
    x = ops.conv(params["conv_out"], jax.nn.silu(ops.norm(params["norm_out"], x)))
    return conv(params[last], x) if last in params else x
