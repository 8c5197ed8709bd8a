import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.flops import count_flops, counted_attention
from pid_jax.models import build_model, init_parameters, repa
from pid_jax.models.rope import image_rope

TINY = {"hidden_size": 16, "num_groups": 2, "patch_size": 2, "patch_depth": 2, "pixel_depth": 1,
        "pixel_hidden_size": 4, "num_classes": 3}
SIZES = {"b": dict(hidden_size=768, num_groups=12, patch_depth=12, pixel_depth=2),
         "l": dict(hidden_size=1024, num_groups=16, patch_depth=22, pixel_depth=4),
         "xl": {}}


def parameters(**options):
    net = build_model("pixeldit_c2i", **options)
    shapes = jax.eval_shape(lambda: init_parameters(net, jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("size, plain, post", [
    ("b", 184_749_155, 172_149_859), ("l", 569_648_963, 536_061_763),
    ("xl", 797_383_203, 759_601_699)])
def test_parameter_counts_of_the_paper_sizes(size, plain, post):
    assert parameters(**SIZES[size]) == plain
    assert parameters(**SIZES[size], pit_adaln_post_modulation=True) == post


def test_flops_of_the_base_size():
    net = build_model("pixeldit_c2i", **SIZES["b"], attention=counted_attention)
    shapes = jax.eval_shape(lambda: init_parameters(net, jax.random.key(0)))
    image = jax.ShapeDtypeStruct((1, 256, 256, 3), jnp.float32)
    one = lambda kind: jax.ShapeDtypeStruct((1,), kind)
    counted = count_flops(lambda p, x, t, y: net.apply({"params": p}, x, t, y).x, shapes, image,
                          one(jnp.float32), one(jnp.int32))
    assert counted.total == pytest.approx(75.4e9, rel=0.02)


@functools.cache
def tiny():
    net = build_model("pixeldit_c2i", **TINY, repa_features=5, repa_width=6)
    return net, init_parameters(net, jax.random.key(0))


def test_fresh_networks_answer_zero_and_their_modulations_are_zero():
    net, params = tiny()
    out = jax.jit(lambda: net.apply({"params": params}, jnp.ones((2, 4, 8, 3)), jnp.zeros(2),
                                    jnp.array([0, 3])).x)()
    assert out.shape == (2, 4, 8, 3) and not np.any(out)
    for blocks in ("patch_blocks", "pixel_blocks"):
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(params[blocks]["adaLN_modulation"]))
    assert np.std(params["y_embedder"]["embedding"]) == pytest.approx(0.02, rel=0.5)


def test_the_projector_is_there_when_features_are():
    _, params = tiny()
    tokens = jnp.ones((1, 3, 16))
    assert repa.project(params[repa.NAME], tokens).shape == (1, 3, 5)
    assert repa.NAME not in jax.eval_shape(lambda: init_parameters(
        build_model("pixeldit_c2i", **TINY), jax.random.key(0)))


def test_extrapolated_positions_equal_the_original_on_a_16_grid_only():
    same = [image_rope(8, (16, 16), mode) for mode in ("original", "extrapolated")]
    other = [image_rope(8, (8, 8), mode) for mode in ("original", "extrapolated")]
    np.testing.assert_array_equal(same[0].cos, same[1].cos)
    assert np.abs(other[0].sin - other[1].sin).max() > 0.1


@pytest.mark.parametrize("options, words", [
    ({"num_groups": 3}, "does not divide"), ({"pixel_hidden_size": 6}, "multiple of 4"),
    ({"rope_mode": "ntk_aware"}, "extrapolated"), ({"num_classes": 0}, "at least 1"),
    ({"repa_features": -1}, "repa_features is -1")])
def test_impossible_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        build_model("pixeldit_c2i", **TINY | options)


def test_wrong_inputs_are_refused():
    net, params = tiny()
    call = lambda x, t, y: jax.eval_shape(
        lambda: net.apply({"params": params}, x, t, y).x)
    x, t, y = jnp.zeros((2, 4, 4, 3)), jnp.zeros(2), jnp.zeros(2, int)
    with pytest.raises(UserError, match="not a multiple of patch_size"):
        call(jnp.zeros((2, 5, 4, 3)), t, y)
    with pytest.raises(UserError, match="one time and one label"):
        call(x, t, y[:1])
    with pytest.raises(UserError, match="whole numbers"):
        call(x, t, t)
