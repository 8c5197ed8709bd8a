"""The MaskGIT-VQGAN pixel codec that TiTok decodes through (arXiv 2202.04200), as plain functions.

Grids are [B, H, W, C]; pictures are in [0, 1] and are not clamped. Released weights were trained
with a slip that must stay: in a residual block that changes the number of channels the shortcut
convolution is applied to the block's output, and its input is dropped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pid_jax.models.convolution import affine_init, conv, conv_init, group_norm
from pid_jax.models.layers import Params

GROUPS = 32
EPS = 1e-6


class PixelCodecDims(NamedTuple):
    """Channels at full resolution, their multiples by level, blocks a level, latent channels."""

    hidden_channels: int = 128
    channel_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    z_channels: int = 256

    def width(self, level: int) -> int:
        """Channels of a level; level 0 has the resolution of the picture."""
        return self.hidden_channels * self.channel_mult[level]

    @property
    def levels(self) -> int:
        """Number of resolutions, each half of the one before."""
        return len(self.channel_mult)


# ---- initial values -----------------------------------------------------------------------------

class _Keys:
    """Random keys, one after another."""

    def __init__(self, key: jax.Array):
        self._key = key

    def __call__(self) -> jax.Array:
        self._key, new = jax.random.split(self._key)
        return new


def _conv(keys: _Keys, size: int, n_in: int, n_out: int, bias: bool = True) -> dict:
    params = conv_init(keys(), size, n_in, n_out)
    return params if bias else {"kernel": params["kernel"]}


def _res_init(keys: _Keys, n_in: int, n_out: int) -> dict:
    params = {"norm1": affine_init(n_in), "conv1": _conv(keys, 3, n_in, n_out, bias=False),
              "norm2": affine_init(n_out), "conv2": _conv(keys, 3, n_out, n_out, bias=False)}
    if n_in != n_out:
        params["nin_shortcut"] = _conv(keys, 1, n_out, n_out, bias=False)
    return params


def _stack_init(keys: _Keys, name: str, count: int, n_in: int, n_out: int) -> dict:
    return {f"{name}_{i}": _res_init(keys, n_in if i == 0 else n_out, n_out) for i in range(count)}


def decoder_init(key: jax.Array, dims: PixelCodecDims) -> dict:
    """Parameters of `decode_pixels`."""
    keys, width = _Keys(key), dims.width(dims.levels - 1)
    params = {"conv_in": _conv(keys, 3, dims.z_channels, width),
              **_stack_init(keys, "mid", dims.num_res_blocks, width, width)}
    for level in reversed(range(dims.levels)):
        params[f"up_{level}"] = _stack_init(keys, "block", dims.num_res_blocks, width,
                                            dims.width(level))
        width = dims.width(level)
        if level:
            params[f"up_{level}"]["upsample_conv"] = _conv(keys, 3, width, width)
    return params | {"norm_out": affine_init(width), "conv_out": _conv(keys, 3, width, 3)}


def encoder_init(key: jax.Array, dims: PixelCodecDims) -> dict:
    """Parameters of `encode_pixels`."""
    keys, width = _Keys(key), dims.hidden_channels
    params = {"conv_in": _conv(keys, 3, 3, width, bias=False)}
    for level in range(dims.levels):
        params[f"down_{level}"] = _stack_init(keys, "block", dims.num_res_blocks, width,
                                              dims.width(level))
        width = dims.width(level)
    return params | {**_stack_init(keys, "mid", dims.num_res_blocks, width, width),
                     "norm_out": affine_init(width),
                     "conv_out": _conv(keys, 1, width, dims.z_channels)}


# ---- forward ------------------------------------------------------------------------------------

def decode_pixels(params: Params, hidden: jax.Array, dims: PixelCodecDims) -> jax.Array:
    """Code vectors [B, h, w, z_channels] -> picture [B, h * 2^(levels-1), ..., 3]."""
    x = _res_blocks(params, "mid", conv(params["conv_in"], hidden, padding=1))
    for level in reversed(range(dims.levels)):
        x = _res_blocks(params[f"up_{level}"], "block", x)
        if level:
            x = conv(params[f"up_{level}"]["upsample_conv"], _double(x), padding=1)
    return conv(params["conv_out"], _norm_silu(params["norm_out"], x), padding=1)


def encode_pixels(params: Params, pictures: jax.Array, dims: PixelCodecDims) -> jax.Array:
    """Pictures [B, H, W, 3] in [0, 1] -> vectors [B, H / 2^(levels-1), ..., z_channels]."""
    x = conv(params["conv_in"], pictures, padding=1)
    for level in range(dims.levels):
        x = _res_blocks(params[f"down_{level}"], "block", x)
        x = x if level == dims.levels - 1 else _halve(x)
    x = _res_blocks(params, "mid", x)
    return conv(params["conv_out"], _norm_silu(params["norm_out"], x))


def soft_codes(codebook: jax.Array, hidden: jax.Array) -> jax.Array:
    """softmax(-squared distance) of vectors [..., C] to every code [N, C], [..., N] float32."""
    return jax.nn.softmax(-squared_distances(hidden, codebook), axis=-1)


def squared_distances(vectors: jax.Array, codebook: jax.Array) -> jax.Array:
    """|v|^2 + |c|^2 - 2 v c of vectors [..., C] and codes [N, C], float32 [..., N]."""
    vectors, codebook = vectors.astype(jnp.float32), codebook.astype(jnp.float32)
    lengths = jnp.sum(vectors**2, -1, keepdims=True) + jnp.sum(codebook**2, -1)
    return lengths - 2 * vectors @ codebook.T


def _res_blocks(params: Params, name: str, x: jax.Array) -> jax.Array:
    for i in range(sum(key.startswith(f"{name}_") for key in params)):
        x = _res_block(params[f"{name}_{i}"], x)
    return x


def _res_block(params: Params, x: jax.Array) -> jax.Array:
    h = conv(params["conv1"], _norm_silu(params["norm1"], x), padding=1)
    h = conv(params["conv2"], _norm_silu(params["norm2"], h), padding=1)
    return h + (conv(params["nin_shortcut"], h) if "nin_shortcut" in params else x)


def _norm_silu(params: Params, x: jax.Array) -> jax.Array:
    return jax.nn.silu(group_norm(params, x, GROUPS, EPS))


def _double(x: jax.Array) -> jax.Array:
    """Nearest-neighbour enlargement by 2."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def _halve(x: jax.Array) -> jax.Array:
    """Means of 2 x 2 cells."""
    b, h, w, c = x.shape
    return x.reshape(b, h // 2, 2, w // 2, 2, c).mean((2, 4))
