"""The discriminator of PiD's distillation: convolutional heads on features of the transformer."""

import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from pid_jax.errors import UserError


def head_widths(inner_dim: int, num_conv_layers: int) -> list[int]:
    """Output channels of the strided convolutions: inner_dim // 2, then max(half, 64) each."""
    widths = []
    for _ in range(num_conv_layers - 1):
        widths.append(max(widths[-1] // 2, 64) if widths else inner_dim // 2)
    return widths


def norm_groups(channels: int) -> int:
    """Groups of a GroupNorm: channels // 4 up to 32 channels, else the largest divisor <= 32."""
    if channels > 32:
        return max(g for g in range(1, 33) if channels % g == 0)
    groups = max(1, channels // 4)
    if channels % groups:
        raise UserError(f"a discriminator layer of {channels} channels cannot be normalised in"
                        f" {groups} groups: choose another inner_dim")
    return groups


def torch_bias_init(fan_in: int):
    """PyTorch's default bias: uniform within 1 / sqrt(fan_in)."""
    bound = 1 / math.sqrt(fan_in)
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


class Head(nn.Module):
    """One feature map `[B, h, w, inner_dim]` to logits: `[B, 1]`, or `[B, h' * w']` per patch."""

    num_conv_layers: int
    patch_logits: bool
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(self.dtype)
        for i, width in enumerate(head_widths(x.shape[-1], self.num_conv_layers)):
            x = self._conv(x, width, 4, f"conv_{i}", strides=2, padding=1)
            x = nn.GroupNorm(norm_groups(width), epsilon=1e-5, use_fast_variance=False,
                             dtype=self.dtype, param_dtype=self.param_dtype, name=f"norm_{i}")(x)
            x = nn.leaky_relu(x, 0.2)
        logits = self._conv(x, 1, 1, "conv_out")[..., 0].astype(jnp.float32)
        if not self.patch_logits:
            return logits.mean(axis=(1, 2))[:, None]
        return logits.reshape(logits.shape[0], -1)

    def _conv(self, x, width: int, kernel: int, name: str, **options) -> jax.Array:
        fan_in = kernel**2 * x.shape[-1]
        return nn.Conv(width, (kernel, kernel), dtype=self.dtype, param_dtype=self.param_dtype,
                       kernel_init=nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform"),
                       bias_init=torch_bias_init(fan_in), name=name, **options)(x)


class Discriminator(nn.Module):
    """Real or generated, from features of chosen transformer blocks (PiD, arXiv 2605.23902).

    Attributes:
      feature_indices: 0-based blocks whose features are judged, one head each; order and
        repetitions do not matter, indices >= num_blocks are dropped; None: num_blocks // 2.
      num_blocks: depth of the transformer; inner_dim: width of its features.
      num_conv_layers: convolutions of a head, the last one 1x1, the others halving the grid.
      patch_logits: one logit per remaining cell instead of their mean.
    """

    inner_dim: int
    num_blocks: int
    feature_indices: tuple[int, ...] | None = None
    num_conv_layers: int = 2
    patch_logits: bool = False
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    def __post_init__(self):
        _check_options(self)
        super().__post_init__()

    @property
    def taps(self) -> tuple[int, ...]:
        """The blocks used, ascending: pass them to the transformer as `feature_indices`."""
        return taps_of(self.feature_indices, self.num_blocks)

    @nn.compact
    def __call__(self, features: Sequence[jax.Array]) -> jax.Array:
        """Judges features `[B, h, w, inner_dim]`, one per block of `taps`, in that order.

        Returns: float32 logits `[B, heads]`, or `[B, heads * h' * w']` with patch_logits.
        """
        _check_features(self, features)
        heads = [Head(self.num_conv_layers, self.patch_logits, self.dtype, self.param_dtype,
                      name=f"head_{i}") for i in range(len(self.taps))]
        return jnp.concatenate([head(x) for head, x in zip(heads, features)], axis=1)


def taps_of(feature_indices: Sequence[int] | None, num_blocks: int) -> tuple[int, ...]:
    """Blocks to judge: ascending, each once, those that exist; None: the middle one."""
    if feature_indices is None:
        return (num_blocks // 2,)
    return tuple(sorted({i for i in feature_indices if i < num_blocks}))


def _check_options(d: Discriminator) -> None:
    taps = taps_of(d.feature_indices, d.num_blocks)
    if not taps or taps[0] < 0:
        raise UserError(f"feature_indices {d.feature_indices} name no block to judge: choose from 0"
                        f" to num_blocks - 1 = {d.num_blocks - 1}")
    if d.num_conv_layers < 1:
        raise UserError(f"num_conv_layers is {d.num_conv_layers}; a head needs at least 1")


def _check_features(d: Discriminator, features: Sequence[jax.Array]) -> None:
    if len(features) != len(d.taps):
        raise UserError(f"the discriminator got {len(features)} feature maps, but judges blocks"
                        f" {d.taps}: pass one feature map for each")
    shrink = 2 ** (d.num_conv_layers - 1)
    for i, x in zip(d.taps, features):
        if x.ndim != 4 or x.shape[-1] != d.inner_dim:
            raise UserError(f"the feature of block {i} has shape {x.shape}, expected [batch, height,"
                            f" width, {d.inner_dim}] (inner_dim)")
        if min(x.shape[1:3]) < shrink:
            raise UserError(f"the feature of block {i} has a grid of {x.shape[1]}x{x.shape[2]},"
                            f" {d.num_conv_layers} convolutions need at least {shrink}x{shrink}")
