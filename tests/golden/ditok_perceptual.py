"""Perceptual distances of the ditok cases; trunk weights come from the case's recipe."""

import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.encoders import perceptual
from pid_jax.tensor_files import read_tensors
from tests.golden.cases import Case, assert_close, handles
from tests.golden.ditok_inception import recipe_weights
from tests.golden.layout import to_nchw, to_nhwc

LAYERS = {"vgg": perceptual.vgg_layers(step=2), "alex": perceptual.ALEX_LAYERS}


def _check(case: Case, distance, a: np.ndarray, b: np.ndarray, whole=jnp.sum) -> None:
    """Distances, layers, features and the gradient of the `whole` for a, in the case's ranges."""

    def total(a, b):
        return whole(distance(a, b)), (distance.layers(a, b), distance.features(a))

    (_, (layers, features)), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(a, b)
    count = len(a)
    found = {"distance": layers.sum(0).reshape(count, 1, 1, 1),
             "loss": layers.sum(0).mean()[None], "per_layer_l1": layers.mean(1)}
    found |= {f"layer{i}": layer.reshape(count, 1, 1, 1) for i, layer in enumerate(layers)}
    found |= {f"feat{i}_mean_abs": jnp.abs(feature).mean()[None]
              for i, feature in enumerate(features)}
    for name, expected in case.outputs.items():
        assert_close(found[name], expected, case.tolerance["atol"], case.tolerance["rtol"], name)
    for name, expected in case.under("grad/").items():
        assert name == "a"
        _check_gradient(case, to_nchw(grad), expected)


def _check_gradient(case: Case, actual: np.ndarray, expected: np.ndarray) -> None:
    """The case bounds the error by a share of the largest entry."""
    share = float(re.search(r"<= ([\d.e-]+) of max-abs", case.tolerance["grad"])[1])
    assert_close(actual, expected, share * np.abs(expected).max(), name="gradient")


@handles("ditok", r"lpips_(vgg|alex)(?!_imagenet).*")
def check_lpips(case: Case) -> None:
    weights = recipe_weights(case) | case.under("param/")
    distance = perceptual.make_lpips(LAYERS[case.meta["config"]["net"]], weights, case.name)
    _check(case, distance, *(to_nhwc(case.inputs[name]) for name in "ab"))


@handles("ditok", r"lpips_(vgg|alex)_imagenet.*")
def check_lpips_imagenet(case: Case) -> None:
    """Needs PID_LPIPS_WEIGHTS, a folder with lpips_vgg and lpips_alex (.safetensors or .npz)."""
    net = case.meta["config"]["net"]
    folder = Path(os.environ.get("PID_LPIPS_WEIGHTS", ""))
    files = [file for ending in (".safetensors", ".npz")
             if (file := folder / f"lpips_{net}{ending}").is_file()]
    if not files:
        pytest.skip("the ImageNet weights of LPIPS are not stored here; name their folder in "
                    "PID_LPIPS_WEIGHTS")
    distance = perceptual.make_lpips(LAYERS[net], read_tensors(files[0]), str(files[0]))
    _check(case, distance, *(to_nhwc(case.inputs[name]) for name in "ab"))


@handles("ditok", r"vgg16bn_perceptual.*")
def check_vgg(case: Case) -> None:
    config = case.meta["config"]
    distance = perceptual.make_vgg_l1(recipe_weights(case), case.name)
    taps = [layer.index + 2 for layer in distance.trunk.layers if layer.tap]
    assert taps == config["layers"] and set(config["weights"]) == {1}
    # L1 has a kink wherever two features are equal: rounded alike only in float64.
    with jax.enable_x64(True):
        pictures = (to_nhwc(case.inputs[name]).astype(np.float64) for name in "ab")
        _check(case, _InUnitRange(distance), *pictures, whole=jnp.mean)


class _InUnitRange:
    """A distance for pictures in [0, 1], the range of its cases and of their gradients."""

    def __init__(self, distance: perceptual.VggL1):
        self.distance = distance

    def __call__(self, a, b):
        return self.distance(2 * a - 1, 2 * b - 1)

    def layers(self, a, b):
        return self.distance.layers(2 * a - 1, 2 * b - 1)

    def features(self, a):
        return self.distance.features(2 * a - 1)
