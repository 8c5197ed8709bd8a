"""Convolutions on `[B, H, W, C]` and the norms that go with them, over parameter dicts.

A convolution is `{"kernel": [kh, kw, in, out], "bias": [out]}` (no bias: no such key), a norm
`{"scale", "bias"}`, both `[C]`. Parameters are cast to the dtype of the activations; statistics
are float32.
"""

import math

import jax
import jax.numpy as jnp

from pid_jax.models.layers import LAYER_NORM_EPS, KernelInit, Params, torch_uniform


def conv_init(key: jax.Array, size: int, n_in: int, n_out: int,
              kernel: KernelInit = torch_uniform, zero_bias: bool = False) -> dict:
    """Parameters of a `size` x `size` convolution; the bias is PyTorch's default or zero."""
    kernel_key, bias_key = jax.random.split(key)
    bound = 0.0 if zero_bias else 1 / math.sqrt(size * size * n_in)
    return {"kernel": kernel(kernel_key, (size, size, n_in, n_out)),
            "bias": jax.random.uniform(bias_key, (n_out,), minval=-bound, maxval=bound)}


def conv(params: Params, x: jax.Array, stride: int = 1, padding: int = 0) -> jax.Array:
    """Convolves `[B, H, W, in]` to `[B, H', W', out]`, with `padding` zeros on every side."""
    out = jax.lax.conv_general_dilated(
        x, params["kernel"].astype(x.dtype), (stride, stride), [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return out + params["bias"].astype(x.dtype) if "bias" in params else out


def affine_init(channels: int) -> dict:
    """Parameters of a group or layer norm: scale one, bias zero."""
    return {"scale": jnp.ones((channels,)), "bias": jnp.zeros((channels,))}


def group_norm(params: Params, x: jax.Array, groups: int,
               eps: float = LAYER_NORM_EPS) -> jax.Array:
    """GroupNorm of `[B, H, W, C]`; groups are runs of neighbouring channels."""
    batch, height, width, channels = x.shape
    grouped = x.reshape(batch, height, width, groups, channels // groups)
    return affine(params, standardise(grouped, (1, 2, 4), eps).reshape(x.shape), x.dtype)


def layer_norm(params: Params, x: jax.Array, eps: float = LAYER_NORM_EPS) -> jax.Array:
    """LayerNorm over the last axis; without an affine map where `params` is empty."""
    normed = standardise(x, (-1,), eps)
    return affine(params, normed, x.dtype) if params else normed.astype(x.dtype)


def standardise(x: jax.Array, axes: tuple[int, ...], eps: float = LAYER_NORM_EPS) -> jax.Array:
    """Zero mean and unit variance over `axes`, in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(axes, keepdims=True)
    variance = jnp.square(centred).mean(axes, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps)


def affine(params: Params, normed: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`normed` in `dtype`, times the scale plus the bias of a norm."""
    return normed.astype(dtype) * params["scale"].astype(dtype) + params["bias"].astype(dtype)
