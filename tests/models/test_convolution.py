"""Convolutions and norms against their definitions, with inputs small enough to show epsilon."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.models import convolution


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def standardise(x, axes):
    x = np.asarray(x, np.float64)
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


@pytest.mark.parametrize("spread", [1e-3, 1.0])
def test_group_norm(spread):
    x = spread * normal(2, 3, 4, 8)
    params = {"scale": normal(8, seed=1), "bias": normal(8, seed=2)}
    expected = standardise(x.reshape(2, 12, 4, 2), (1, 3)).reshape(x.shape)
    actual = convolution.group_norm(params, jnp.asarray(x), 4)
    np.testing.assert_allclose(actual, expected * params["scale"] + params["bias"], atol=1e-5)


@pytest.mark.parametrize("spread", [1e-3, 1.0])
def test_layer_norm(spread):
    x = spread * normal(2, 3, 8)
    params = {"scale": normal(8, seed=1), "bias": normal(8, seed=2)}
    actual = convolution.layer_norm(params, jnp.asarray(x))
    np.testing.assert_allclose(actual, standardise(x, -1) * params["scale"] + params["bias"],
                               atol=1e-5)


def test_norms_are_exact_far_from_zero():
    """A one-pass variance loses all digits here."""
    x = 1000 + normal(1, 4, 4, 8)
    actual = convolution.group_norm(convolution.affine_init(8), jnp.asarray(x), 4)
    expected = standardise(x.reshape(1, 16, 4, 2), (1, 3)).reshape(x.shape)
    np.testing.assert_allclose(actual, expected, atol=2e-3)


def test_strided_convolution_is_a_sum_over_the_window():
    x, kernel, bias = normal(1, 5, 7, 2), normal(4, 4, 2, 3, seed=1), normal(3, seed=2)
    actual = convolution.conv({"kernel": kernel, "bias": bias}, jnp.asarray(x), 2, 1)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    assert actual.shape == (1, 2, 3, 3)
    for row in range(2):
        for column in range(3):
            window = padded[0, 2 * row:2 * row + 4, 2 * column:2 * column + 4]
            np.testing.assert_allclose(actual[0, row, column],
                                       np.einsum("hwi,hwio->o", window, kernel) + bias, atol=1e-5)


def test_initial_values_are_pytorch_defaults():
    params = convolution.conv_init(jax.random.key(0), 3, 16, 64)
    bound = 1 / np.sqrt(9 * 16)
    for leaf in params.values():
        assert 0.8 * bound < np.abs(leaf).max() <= bound
