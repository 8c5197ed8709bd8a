"""The discriminator: its width and group rules, output shapes, order of features, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.models import discriminator
from pid_jax.models.discriminator import Discriminator


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("inner, layers, widths", [
    (1536, 2, [768]), (1536, 4, [768, 384, 192]), (48, 3, [24, 64]), (144, 4, [72, 64, 64]),
    (48, 1, [])])
def test_widths_halve_but_not_below_64_after_the_first(inner, layers, widths):
    assert discriminator.head_widths(inner, layers) == widths


@pytest.mark.parametrize("channels, groups", [(2, 1), (24, 6), (32, 8), (72, 24), (64, 32),
                                              (768, 32), (37, 1), (35, 7)])
def test_groups(channels, groups):
    assert discriminator.norm_groups(channels) == groups


def test_logits_per_head_or_per_cell():
    features = [normal(2, 9, 12, 16, seed=i) for i in range(2)]
    for patch_logits, shape in ((False, (2, 2)), (True, (2, 2 * 2 * 3))):
        net = Discriminator(16, 4, (0, 2), num_conv_layers=3, patch_logits=patch_logits)
        params = net.init(jax.random.key(0), features)
        assert net.apply(params, features).shape == shape


def test_mean_logit_is_the_mean_of_the_patch_logits():
    features = [normal(2, 8, 12, 16)]
    patches = Discriminator(16, 4, (1,), patch_logits=True)
    params = patches.init(jax.random.key(0), features)
    means = Discriminator(16, 4, (1,)).apply(params, features)
    np.testing.assert_allclose(patches.apply(params, features).mean(1), means[:, 0], atol=1e-6)


def test_taps_are_ascending_and_existing():
    assert Discriminator(16, 3, (2, 0, 2, 7)).taps == (0, 2)
    assert Discriminator(16, 5).taps == (2,)


def test_each_head_judges_its_own_feature():
    net = Discriminator(16, 4, (2, 0))
    features = [normal(1, 4, 4, 16, seed=i) for i in range(2)]
    params = net.init(jax.random.key(0), features)
    before = net.apply(params, features)
    after = net.apply(params, [features[0], features[1] + 1])
    np.testing.assert_array_equal(before[:, 0], after[:, 0])
    assert (before[:, 1] != after[:, 1]).all()


def test_norm_sees_tiny_inputs_through_its_epsilon():
    """A GroupNorm with epsilon 1e-5 shrinks a signal of spread 1e-4 instead of amplifying it."""
    head = discriminator.Head(2, patch_logits=True)
    x = 1e-4 * normal(1, 8, 8, 16)
    params = head.init(jax.random.key(0), x)
    _, state = head.apply(params, x, capture_intermediates=True)
    (conv,) = state["intermediates"]["conv_0"]["__call__"]
    (norm,) = state["intermediates"]["norm_0"]["__call__"]
    groups = np.asarray(conv, np.float64).reshape(16, 2, 4)
    centred = groups - groups.mean((0, 2), keepdims=True)
    expected = centred / np.sqrt(groups.var((0, 2), keepdims=True) + 1e-5)
    np.testing.assert_allclose(norm.reshape(16, 2, 4), expected, atol=1e-6)


def test_initial_values_are_pytorch_defaults():
    net = Discriminator(64, 2)
    params = net.init(jax.random.key(0), [jnp.zeros((1, 4, 4, 64))])["params"]["head_0"]
    bound = 1 / np.sqrt(16 * 64)
    for leaf in jax.tree.leaves(params["conv_0"]):
        assert np.abs(leaf).max() <= bound and np.abs(leaf).max() > 0.8 * bound


@pytest.mark.parametrize("build, message", [
    (lambda: Discriminator(16, 3, (5,)), "name no block to judge: choose from 0 to"),
    (lambda: Discriminator(16, 3, (-1,)), "name no block to judge"),
    (lambda: Discriminator(16, 3, num_conv_layers=0), "num_conv_layers is 0"),
])
def test_options_that_do_not_fit(build, message):
    with pytest.raises(UserError, match=message):
        build()


@pytest.mark.parametrize("features, message", [
    ([], "got 0 feature maps, but judges blocks"),
    ([normal(1, 4, 4, 8)], "expected .batch, height, width, 16. .inner_dim."),
    ([normal(1, 1, 4, 16)], "has a grid of 1x4, 2 convolutions need at least 2x2"),
])
def test_features_that_do_not_fit(features, message):
    with pytest.raises(UserError, match=message):
        Discriminator(16, 3).init(jax.random.key(0), features)
