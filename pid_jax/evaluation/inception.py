"""The Inception v3 of FID (arXiv 1512.00567, weights of 2015-12-05) as one pure function.

The graph is that of the TensorFlow release which FID is defined with, under the names of its
PyTorch conversions (1008 classes, average pooling that leaves padding out, one maximum pooling in
the last block). Batch norms are folded into the convolutions when the weights are read.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.diffusion import resampling
from pid_jax.errors import UserError
from pid_jax.tensor_files import read_tensors

SIDE = 299
CLASSES = 1008
FEATURES = 2048
SPATIAL_CHANNELS = 7
BATCH_NORM_EPS = 1e-3

InceptionParams = Mapping[str, Mapping[str, jax.Array]]


class InceptionOutput(NamedTuple):
    """Features of B pictures, float32."""

    pooled: jax.Array  # [B, 2048], those of FID, precision and recall
    spatial: jax.Array  # [B, 17 * 17 * 7], those of sFID
    logits: jax.Array  # [B, 1008]
    logits_unbiased: jax.Array  # [B, 1008], without the last bias: those of the Inception Score
    shallow: tuple[jax.Array, ...]  # [B, 64], [B, 192], [B, 768] means of earlier layers


# ---- the graph ----------------------------------------------------------------------------------

class Conv(NamedTuple):
    """A convolution with folded batch norm and ReLU."""

    name: str
    width: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    padding: str = "SAME"


def _average(x: jax.Array) -> jax.Array:
    """3 x 3 means at stride 1 over the pixels that exist."""
    ones = jnp.ones((1, *x.shape[1:3], 1), x.dtype)
    return _window(x, jax.lax.add, 0.0) / _window(ones, jax.lax.add, 0.0)


def _maximum(x: jax.Array) -> jax.Array:
    return _window(x, jax.lax.max, -jnp.inf)


def _halved(x: jax.Array) -> jax.Array:
    return _window(x, jax.lax.max, -jnp.inf, 2, "VALID")


def _window(x, operation, start, stride=1, padding="SAME"):
    return jax.lax.reduce_window(x, start, operation, (1, 3, 3, 1), (1, stride, stride, 1), padding)


# A step is a convolution, a pooling, or a fork: convolutions side by side, concatenated.
Step = Conv | Callable[[jax.Array], jax.Array] | tuple[Conv, ...]
Branch = Sequence[Step]


def _strided(name: str, width: int) -> Conv:
    return Conv(name, width, (3, 3), 2, "VALID")


def _block_a(pool: int) -> Sequence[Branch]:
    return ([Conv("branch1x1", 64)],
            [Conv("branch5x5_1", 48), Conv("branch5x5_2", 64, (5, 5))],
            [Conv("branch3x3dbl_1", 64), Conv("branch3x3dbl_2", 96, (3, 3)),
             Conv("branch3x3dbl_3", 96, (3, 3))],
            [_average, Conv("branch_pool", pool)])


def _block_c(inner: int) -> Sequence[Branch]:
    wide, high = (1, 7), (7, 1)
    return ([Conv("branch1x1", 192)],
            [Conv("branch7x7_1", inner), Conv("branch7x7_2", inner, wide),
             Conv("branch7x7_3", 192, high)],
            [Conv("branch7x7dbl_1", inner), Conv("branch7x7dbl_2", inner, high),
             Conv("branch7x7dbl_3", inner, wide), Conv("branch7x7dbl_4", inner, high),
             Conv("branch7x7dbl_5", 192, wide)],
            [_average, Conv("branch_pool", 192)])


def _block_e(pool: Callable[[jax.Array], jax.Array]) -> Sequence[Branch]:
    fork = lambda name: (Conv(f"{name}a", 384, (1, 3)), Conv(f"{name}b", 384, (3, 1)))
    return ([Conv("branch1x1", 320)],
            [Conv("branch3x3_1", 384), fork("branch3x3_2")],
            [Conv("branch3x3dbl_1", 448), Conv("branch3x3dbl_2", 384, (3, 3)),
             fork("branch3x3dbl_3")],
            [pool, Conv("branch_pool", 192)])


STEM = ((_strided("Conv2d_1a_3x3", 32), Conv("Conv2d_2a_3x3", 32, (3, 3), 1, "VALID"),
         Conv("Conv2d_2b_3x3", 64, (3, 3)), _halved),
        (Conv("Conv2d_3b_1x1", 80), Conv("Conv2d_4a_3x3", 192, (3, 3), 1, "VALID"), _halved))
BLOCKS: Mapping[str, Sequence[Branch]] = {
    "Mixed_5b": _block_a(32), "Mixed_5c": _block_a(64), "Mixed_5d": _block_a(64),
    "Mixed_6a": ([_strided("branch3x3", 384)],
                 [Conv("branch3x3dbl_1", 64), Conv("branch3x3dbl_2", 96, (3, 3)),
                  _strided("branch3x3dbl_3", 96)],
                 [_halved]),
    "Mixed_6b": _block_c(128), "Mixed_6c": _block_c(160), "Mixed_6d": _block_c(160),
    "Mixed_6e": _block_c(192),
    "Mixed_7a": ([Conv("branch3x3_1", 192), _strided("branch3x3_2", 320)],
                 [Conv("branch7x7x3_1", 192), Conv("branch7x7x3_2", 192, (1, 7)),
                  Conv("branch7x7x3_3", 192, (7, 1)), _strided("branch7x7x3_4", 192)],
                 [_halved]),
    "Mixed_7b": _block_e(_average), "Mixed_7c": _block_e(_maximum),
}
SPATIAL_BLOCK = "Mixed_6d"  # its first branch is `mixed_6/conv` of the TensorFlow graph


# ---- forward ------------------------------------------------------------------------------------

def inception(params: InceptionParams, pictures: jax.Array) -> InceptionOutput:
    """Features of pictures.

    Args:
      params: from `load_inception`.
      pictures: uint8 (or float with the same values) [B, H, W, 3] in 0..255, of any size.
    """
    x, shallow, spatial = prepare(pictures), [], None
    for steps in STEM:
        x = _run(params, "", steps, x)
        shallow.append(_mean(x))
    for name, branches in BLOCKS.items():
        outputs = [_run(params, f"{name}.", steps, x) for steps in branches]
        if name == SPATIAL_BLOCK:
            spatial = outputs[0][..., :SPATIAL_CHANNELS].reshape(len(x), -1)
        x = jnp.concatenate(outputs, axis=-1)
        shallow += [_mean(x)] if name == "Mixed_6e" else []
    pooled = _mean(x)
    unbiased = jnp.matmul(pooled, params["fc"]["kernel"], precision="highest")
    return InceptionOutput(pooled, spatial, unbiased + params["fc"]["bias"], unbiased,
                           tuple(shallow))


def prepare(pictures: jax.Array) -> jax.Array:
    """Pictures [B, H, W, 3] in 0..255 -> float32 [B, 299, 299, 3] in [-1, 1).

    Bilinear as TensorFlow 1 resizes: pixel i reads position i * in / out, without half-pixel
    centres; other resizing gives another FID.
    """
    large = resampling.resize(pictures, SIDE, SIDE, resampling.corner_bilinear_matrix)
    return (large - 128.0) / 128.0


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=(1, 2))


def _run(params: InceptionParams, prefix: str, steps: Branch, x: jax.Array) -> jax.Array:
    for step in steps:
        if isinstance(step, Conv):
            x = _convolve(params[prefix + step.name], step, x)
        elif isinstance(step, tuple):
            x = jnp.concatenate([_convolve(params[prefix + conv.name], conv, x) for conv in step],
                                axis=-1)
        else:
            x = step(x)
    return x


def _convolve(weights: Mapping[str, jax.Array], conv: Conv, x: jax.Array) -> jax.Array:
    x = jax.lax.conv_general_dilated(
        x, weights["kernel"], (conv.stride,) * 2, conv.padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest")
    return jax.nn.relu(x + weights["bias"])


# ---- weights ------------------------------------------------------------------------------------

def convolutions() -> dict[str, tuple[int, int, int, int]]:
    """PyTorch shape [out, in, height, width] of every convolution, by name."""
    shapes, width = {}, 3

    def walk(prefix: str, steps: Branch, width: int) -> int:
        for step in steps:
            group = (step,) if isinstance(step, Conv) else step if isinstance(step, tuple) else ()
            for conv in group:
                shapes[prefix + conv.name] = (conv.width, width, *conv.kernel)
            width = sum(conv.width for conv in group) or width
        return width

    for steps in STEM:
        width = walk("", steps, width)
    for name, branches in BLOCKS.items():
        width = sum([walk(f"{name}.", steps, width) for steps in branches])
    return shapes


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a PyTorch file of these weights (but step counters)."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (CLASSES, FEATURES), "fc.bias": (CLASSES,)}
    for name, shape in convolutions().items():
        shapes[f"{name}.conv.weight"] = shape
        for part in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{name}.bn.{part}"] = shape[:1]
    return shapes


def load_inception(path: str | Path) -> InceptionParams:
    """Reads weights under PyTorch's names from a `.safetensors` or `.npz` file.

    `python -m tools.convert_torch_weights tensors --src pt_inception-2015-12-05.pth --dst FILE`
    makes such a file.
    Raises:
      UserError: no such file, or it holds other weights.
    """
    return fold(read_tensors(path), str(path))


def fold(tensors: Mapping[str, np.ndarray], where: str) -> InceptionParams:
    """PyTorch tensors by name -> kernels HWIO and biases with the batch norms folded in, float32.

    Raises:
      UserError: tensors are missing or have other shapes; `where` names their file.
    """
    expected = tensor_shapes()
    wrong = [name for name, shape in expected.items()
             if name not in tensors or tuple(tensors[name].shape) != shape]
    if wrong:
        raise UserError(f"{where} does not hold the Inception v3 of FID: {len(wrong)} of "
                        f"{len(expected)} tensors are missing or of another shape, such as "
                        f"{', '.join(wrong[:3])}")
    params = {name: _folded(tensors, name) for name in convolutions()}
    return params | {"fc": {"kernel": np.float32(tensors["fc.weight"]).T,
                            "bias": np.float32(tensors["fc.bias"])}}


def _folded(tensors: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    weight, *norm = (tensors[f"{name}.{part}"].astype(np.float64) for part in (
        "conv.weight", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"))
    scale = norm[0] / np.sqrt(norm[3] + BATCH_NORM_EPS)
    return {"kernel": np.float32((weight * scale[:, None, None, None]).transpose(2, 3, 1, 0)),
            "bias": np.float32(norm[1] - norm[2] * scale)}
