"""Perceptual distances of pictures: LPIPS on VGG16 or AlexNet, and L1 of VGG16-BN features.

Weights come from a file under PyTorch's names and are never downloaded. Pictures are [B, H, W, 3]
in [-1, 1], distances float32 [B]. Sources: LPIPS v0.1 (arXiv 1801.03924); the trunks are
torchvision's. The VGG16-BN distance is this project's: the sum over five layers of mean |a - b|.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.errors import UserError
from pid_jax.models.convolution import conv
from pid_jax.tensor_files import read_tensors

LPIPS_SHIFT = np.float32([-0.030, -0.088, -0.188])
LPIPS_SCALE = np.float32([0.458, 0.448, 0.450])
IMAGENET_MEAN = np.float32([0.485, 0.456, 0.406])
IMAGENET_STD = np.float32([0.229, 0.224, 0.225])
UNIT_EPS = 1e-10
BATCH_NORM_EPS = 1e-5


class Layer(NamedTuple):
    """A convolution with ReLU; `index` is its place among torchvision's `features`.

    `pool` is the side of a maximum pooling with stride 2 before it (0: none), `tap` whether its
    output is a feature.
    """

    index: int
    shape: tuple[int, int, int, int]  # out, in, rows, columns
    stride: int = 1
    padding: int = 1
    pool: int = 0
    tap: bool = False


def vgg_layers(step: int) -> tuple[Layer, ...]:
    """VGG16 with `step` modules a convolution: 2 (with ReLU), or 3 (with batch norm)."""
    found, index, n_in = [], 0, 3
    for block, (width, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        index += 1 if block else 0  # the pooling is a module of its own
        for i in range(count):
            found.append(Layer(index, (width, n_in, 3, 3), pool=2 if block and not i else 0,
                               tap=i == count - 1))
            index, n_in = index + step, width
    return tuple(found)


ALEX_LAYERS = (
    Layer(0, (64, 3, 11, 11), stride=4, padding=2, tap=True),
    Layer(3, (192, 64, 5, 5), padding=2, pool=3, tap=True),
    Layer(6, (384, 192, 3, 3), pool=3, tap=True),
    Layer(8, (256, 384, 3, 3), tap=True),
    Layer(10, (256, 256, 3, 3), tap=True))


@dataclasses.dataclass(frozen=True)
class Trunk:
    """Convolutions with their weights.

    Attributes:
      layers: what runs, in order.
      params: index -> {"kernel" HWIO, "bias"}; batch norms are folded in.
    """

    layers: tuple[Layer, ...]
    params: Mapping[int, Mapping[str, np.ndarray]]

    def features(self, x: jax.Array) -> list[jax.Array]:
        """The outputs [B, h, w, C] of the layers that are taps."""
        taps = []
        for layer in self.layers:
            x = _max_pool(x, layer.pool) if layer.pool else x
            x = jax.nn.relu(conv(self.params[layer.index], x, layer.stride, layer.padding))
            taps += [x] if layer.tap else []
        return taps


def _max_pool(x: jax.Array, side: int) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, side, side, 1), (1, 2, 2, 1),
                                 "VALID")


@dataclasses.dataclass(frozen=True)
class Lpips:
    """LPIPS; `heads` are the weights [C] of each layer's channels."""

    trunk: Trunk
    heads: tuple[np.ndarray, ...]

    def features(self, pictures: jax.Array) -> list[jax.Array]:
        """The trunk's features of pictures in [-1, 1]."""
        return self.trunk.features((pictures - LPIPS_SHIFT) / LPIPS_SCALE)

    def layers(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Distances by layer, [layers, B]."""
        pairs = zip(self.heads, self.features(a), self.features(b))
        return jnp.stack([jnp.mean(jnp.sum(head * (_unit(x) - _unit(y)) ** 2, -1), (1, 2))
                          for head, x, y in pairs])

    def __call__(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Distances [B]; 0 for equal pictures."""
        return jnp.sum(self.layers(a, b), axis=0)


def _unit(x: jax.Array) -> jax.Array:
    square = jnp.sum(x * x, -1, keepdims=True)
    length = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
    return x / (length + UNIT_EPS)


@dataclasses.dataclass(frozen=True)
class VggL1:
    """L1 of VGG16-BN features, every layer with the same weight."""

    trunk: Trunk

    def features(self, pictures: jax.Array) -> list[jax.Array]:
        """The trunk's features of pictures in [-1, 1], normalised as for ImageNet."""
        return self.trunk.features(((pictures + 1) / 2 - IMAGENET_MEAN) / IMAGENET_STD)

    def layers(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Mean |a - b| by layer, [layers, B]."""
        pairs = zip(self.features(a), self.features(b))
        return jnp.stack([jnp.mean(jnp.abs(x - y), (1, 2, 3)) for x, y in pairs])

    def __call__(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Distances [B]."""
        return jnp.sum(self.layers(a, b), axis=0)


# ---- weights ------------------------------------------------------------------------------------

def load_distance(name: str, path: str | None) -> Lpips | VggL1:
    """A distance with weights from a file.

    Args:
      name: "lpips_vgg", "lpips_alex" or "vgg16_bn".
      path: `.safetensors` or `.npz`, under the names of lpips' or torchvision's state dict.
    Raises:
      UserError: no file, or it holds other weights.
    """
    if name not in LOADERS:
        raise UserError(f"the perceptual distance {name!r} is unknown; choose one of "
                        f"{', '.join(LOADERS)}")
    if not path:
        raise UserError(f"the perceptual distance {name} needs weights: name their .safetensors "
                        "or .npz file (config.ditok.perceptual_weights, or --lpips_weights)")
    return LOADERS[name](read_tensors(path), path)


def make_lpips(layers: tuple[Layer, ...], tensors: Mapping[str, np.ndarray], where: str) -> Lpips:
    """LPIPS from tensors named sliceJ.N.weight or features.N.weight, and linJ.model.1.weight."""
    widths = [layer.shape[0] for layer in layers if layer.tap]
    named = {_short(name): tensor for name, tensor in tensors.items()}
    expected = _conv_shapes(layers) | {
        f"lin{i}": (1, width, 1, 1) for i, width in enumerate(widths)}
    _check(named, expected, where)
    heads = tuple(np.float32(named[f"lin{i}"]).reshape(-1) for i in range(len(widths)))
    return Lpips(Trunk(layers, _plain(layers, named)), heads)


def make_vgg_l1(tensors: Mapping[str, np.ndarray], where: str) -> VggL1:
    """The VGG16-BN distance from torchvision's tensors features.N.*."""
    layers = vgg_layers(step=3)
    named = {_short(name): tensor for name, tensor in tensors.items()}
    norms = {f"{layer.index + 1}.{part}": layer.shape[:1] for layer in layers
             for part in ("weight", "bias", "running_mean", "running_var")}
    _check(named, _conv_shapes(layers) | norms, where)
    return VggL1(Trunk(layers, {layer.index: _folded(named, layer.index) for layer in layers}))


LOADERS: dict[str, Callable[[Mapping[str, np.ndarray], str], Lpips | VggL1]] = {
    "lpips_vgg": lambda tensors, where: make_lpips(vgg_layers(step=2), tensors, where),
    "lpips_alex": lambda tensors, where: make_lpips(ALEX_LAYERS, tensors, where),
    "vgg16_bn": make_vgg_l1}


def _short(name: str) -> str:
    """The layer's number and the part, or linJ, of any of the known spellings."""
    if match := re.fullmatch(r"(?:net\.)?(?:slice\d|features)\.(\d+\.\w+)", name):
        return match[1]
    if match := re.fullmatch(r"lins?\.?(\d)\.model\.1\.weight", name):
        return f"lin{match[1]}"
    return name


def _conv_shapes(layers: tuple[Layer, ...]) -> dict[str, tuple[int, ...]]:
    weights = {f"{layer.index}.weight": layer.shape for layer in layers}
    return weights | {f"{layer.index}.bias": layer.shape[:1] for layer in layers}


def _check(named: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]],
           where: str) -> None:
    wrong = [name for name, shape in expected.items()
             if name not in named or tuple(named[name].shape) != shape]
    if wrong:
        raise UserError(f"{where} does not hold these weights: {len(wrong)} of {len(expected)} "
                        f"tensors are missing or of another shape, such as {', '.join(wrong[:3])}")


def _plain(layers: tuple[Layer, ...], named: Mapping[str, np.ndarray]) -> dict:
    return {layer.index: {"kernel": _hwio(named[f"{layer.index}.weight"]),
                          "bias": np.float32(named[f"{layer.index}.bias"])} for layer in layers}


def _folded(named: Mapping[str, np.ndarray], index: int) -> dict[str, np.ndarray]:
    """A convolution and the batch norm behind it as one convolution, computed in float64."""
    weight, bias = (named[f"{index}.{part}"].astype(np.float64) for part in ("weight", "bias"))
    gain, shift, mean, variance = (
        named[f"{index + 1}.{part}"].astype(np.float64)
        for part in ("weight", "bias", "running_mean", "running_var"))
    scale = gain / np.sqrt(variance + BATCH_NORM_EPS)
    return {"kernel": _hwio(weight * scale[:, None, None, None]),
            "bias": np.float32((bias - mean) * scale + shift)}


def _hwio(weight: np.ndarray) -> np.ndarray:
    return np.float32(weight.transpose(2, 3, 1, 0))
