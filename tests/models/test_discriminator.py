"""The discriminator: its width and group rules, output shapes, order of features, refusals."""

import jax
import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.models import discriminator, init_parameters
from pid_jax.models.discriminator import Discriminator


def tiny(**options):
    return Discriminator(**{"inner_dim": 16, "num_blocks": 4, **options})


def random_params(net):
    shapes = jax.eval_shape(lambda key: init_parameters(net, key), jax.random.key(0))
    return jax.tree.map(lambda x: 0.3 * normal(*x.shape), shapes)


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


@pytest.mark.parametrize("patch_logits, shape", [(False, (2, 2)), (True, (2, 2 * 2 * 3))])
def test_logits_per_head_or_per_cell(patch_logits, shape):
    features = [normal(2, 9, 12, 16, seed=i) for i in range(2)]
    net = tiny(feature_indices=(0, 2), num_conv_layers=3, patch_logits=patch_logits)
    logits = jax.eval_shape(net.apply, {"params": random_params(net)}, features)
    assert logits.shape == shape and logits.dtype == np.float32


def test_mean_logit_is_the_mean_of_the_patch_logits():
    features = [normal(2, 8, 12, 16)]
    params = {"params": random_params(tiny())}
    patches = tiny(patch_logits=True).apply(params, features)
    means = tiny().apply(params, features)
    np.testing.assert_allclose(patches.mean(1), means[:, 0], atol=1e-6)


def test_taps_are_ascending_and_existing():
    assert tiny(feature_indices=(2, 0, 2, 7)).taps == (0, 2)
    assert tiny(num_blocks=5).taps == (2,)


def test_each_head_judges_its_own_feature():
    net = tiny(feature_indices=(2, 0))
    features = [normal(1, 4, 4, 16, seed=i) for i in range(2)]
    params = {"params": random_params(net)}
    before = net.apply(params, features)
    after = net.apply(params, [features[0], features[1] + 1])
    np.testing.assert_array_equal(before[:, 0], after[:, 0])
    assert (before[:, 1] != after[:, 1]).all()


def test_initial_values_are_pytorch_defaults():
    params = discriminator.head_init(jax.random.key(0), 64, 2)
    bound = 1 / np.sqrt(16 * 64)
    for leaf in jax.tree.leaves(params["conv_0"]):
        assert 0.8 * bound < np.abs(leaf).max() <= bound


@pytest.mark.parametrize("options, message", [
    ({"feature_indices": (5,)}, "name no block to judge: choose from 0 to num_blocks - 1 = 3"),
    ({"feature_indices": (-1,)}, "name no block to judge"),
    ({"num_conv_layers": 0}, "num_conv_layers is 0"),
    ({"inner_dim": 28}, "gives a layer of 14 channels, which 3 groups do not divide"),
])
def test_options_that_do_not_fit(options, message):
    with pytest.raises(UserError, match=message):
        tiny(**options)


@pytest.mark.parametrize("features, message", [
    ([], "got 0 feature maps, but judges blocks"),
    ([normal(1, 4, 4, 8)], "expected .batch, height, width, 16. .inner_dim."),
    ([normal(1, 1, 4, 16)], "has a grid of 1x4, 2 convolutions need 2x2 or more"),
])
def test_features_that_do_not_fit(features, message):
    with pytest.raises(UserError, match=message):
        tiny().apply({"params": random_params(tiny())}, features)
