"""The discriminator of PiD's distillation: convolutional heads on features of the transformer."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pid_jax.errors import UserError
from pid_jax.models.convolution import affine_init, conv, conv_init, group_norm
from pid_jax.models.layers import Params
from pid_jax.models.shell import Init, Shell


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
    return max(1, channels // 4)


def head_init(key: jax.Array, inner_dim: int, num_conv_layers: int) -> dict:
    """Parameters of `head`, drawn as PyTorch's defaults."""
    widths = [inner_dim, *head_widths(inner_dim, num_conv_layers)]
    keys = jax.random.split(key, len(widths))
    params = {"conv_out": conv_init(keys[0], 1, widths[-1], 1)}
    for i, (n_in, n_out) in enumerate(zip(widths, widths[1:])):
        params[f"conv_{i}"] = conv_init(keys[i + 1], 4, n_in, n_out)
        params[f"norm_{i}"] = affine_init(n_out)
    return params


def head(params: Params, x: jax.Array, num_conv_layers: int, patch_logits: bool) -> jax.Array:
    """One feature map `[B, h, w, D]` to float32 logits `[B, 1]`, or `[B, h' * w']` per patch.

    Strided 4x4 convolutions, each with GroupNorm and LeakyReLU(0.2), then a 1x1 convolution.
    """
    for i in range(num_conv_layers - 1):
        x = conv(params[f"conv_{i}"], x, stride=2, padding=1)
        x = group_norm(params[f"norm_{i}"], x, norm_groups(x.shape[-1]))
        x = jax.nn.leaky_relu(x, 0.2)
    logits = conv(params["conv_out"], x)[..., 0].astype(jnp.float32)
    logits = logits.reshape(logits.shape[0], -1)
    return logits if patch_logits else logits.mean(axis=1, keepdims=True)


class Discriminator(Shell):
    """Real or generated, from features of chosen transformer blocks (PiD, arXiv 2605.23902).

    Attributes:
      inner_dim: width of the features; num_blocks: depth of the transformer.
      feature_indices: 0-based blocks whose features are judged, one head each; order and
        repetitions do not matter, indices >= num_blocks are dropped; None: num_blocks // 2.
      num_conv_layers: convolutions of a head, the last one 1x1, the others halving the grid.
      patch_logits: one logit per remaining cell instead of their mean.
    Raises UserError for options that no discriminator can have.
    """

    inner_dim: int = 1536
    num_blocks: int = 14
    feature_indices: tuple[int, ...] | None = None
    num_conv_layers: int = 2
    patch_logits: bool = False
    dtype: Any = jnp.float32

    def __post_init__(self):
        super().__post_init__()
        check_options(self)

    @property
    def taps(self) -> tuple[int, ...]:
        """The blocks used, ascending: pass them to the transformer as `feature_indices`."""
        if self.feature_indices is None:
            return (self.num_blocks // 2,)
        return tuple(sorted({i for i in self.feature_indices if i < self.num_blocks}))

    def parameter_inits(self) -> dict[str, Init]:
        """The parameter tree: one `head_<k>` for the k-th of `taps`."""
        init = functools.partial(head_init, inner_dim=self.inner_dim,
                                 num_conv_layers=self.num_conv_layers)
        return {f"head_{k}": init for k in range(len(self.taps))}

    def __call__(self, features: Sequence[jax.Array]) -> jax.Array:
        """Judges features `[B, h, w, inner_dim]`, one per block of `taps`, in that order.

        Returns: float32 logits `[B, heads]`, or `[B, heads * h' * w']` with patch_logits.
        """
        check_features(self, features)
        logits = [head(self.weights[f"head_{k}"], x.astype(self.dtype), self.num_conv_layers,
                       self.patch_logits) for k, x in enumerate(features)]
        return jnp.concatenate(logits, axis=1)


def check_options(d: Discriminator) -> None:
    """Raises UserError for options that no discriminator can have."""
    if not d.taps or d.taps[0] < 0:
        raise UserError(f"feature_indices {d.feature_indices} name no block to judge: choose from 0"
                        f" to num_blocks - 1 = {d.num_blocks - 1}")
    if d.num_conv_layers < 1:
        raise UserError(f"num_conv_layers is {d.num_conv_layers}; a head needs at least 1")
    for width in head_widths(d.inner_dim, d.num_conv_layers):
        if width < 1 or width % norm_groups(width):
            raise UserError(f"inner_dim {d.inner_dim} gives a layer of {width} channels, which"
                            f" {norm_groups(width)} groups do not divide: choose another width")


def check_features(d: Discriminator, features: Sequence[jax.Array]) -> None:
    """Raises UserError for features that do not fit the discriminator."""
    if len(features) != len(d.taps):
        raise UserError(f"the discriminator got {len(features)} feature maps, but judges blocks"
                        f" {d.taps}: pass one feature map for each")
    smallest = 2 ** (d.num_conv_layers - 1)
    for block, x in zip(d.taps, features):
        if x.ndim != 4 or x.shape[-1] != d.inner_dim:
            raise UserError(f"the feature of block {block} has shape {x.shape}, expected [batch,"
                            f" height, width, {d.inner_dim}] (inner_dim)")
        if min(x.shape[1:3]) < smallest:
            raise UserError(f"the feature of block {block} has a grid of {x.shape[1]}x{x.shape[2]},"
                            f" {d.num_conv_layers} convolutions need {smallest}x{smallest} or more")
