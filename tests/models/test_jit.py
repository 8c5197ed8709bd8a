"""JiT and DiTok's decoder: sizes, fresh predictions, context tokens, dropout, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.models import build_model, init_parameters, jit
from tests.models.test_titok import parameter_count

SIZES = {"b": (768, 12, 12, 128, 4), "l": (1024, 24, 16, 128, 8), "h": (1280, 32, 16, 256, 10)}
COUNTS = {("b", 16): 131_123_712, ("b", 32): 133_190_400, ("l", 16): 458_877_664,
          ("l", 32): 461_534_176, ("h", 16): 952_514_368, ("h", 32): 956_055_616}
TINY = dict(input_size=8, patch_size=4, hidden_size=16, depth=4, num_heads=2, num_classes=3,
            bottleneck_dim=4, in_context_len=2, in_context_start=1)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 3)), jnp.float32)
T, Y = jnp.array([0.1, 0.8]), jnp.array([0, 3])


@pytest.mark.parametrize("size, patch", COUNTS)
def test_published_parameter_counts(size, patch):
    width, depth, heads, bottleneck, start = SIZES[size]
    assert COUNTS[size, patch] == parameter_count(
        "jit", input_size=16 * patch, patch_size=patch, hidden_size=width, depth=depth,
        num_heads=heads, bottleneck_dim=bottleneck, in_context_start=start)


@pytest.mark.parametrize("size, decoder", [("base", 131_133_696), ("large", 458_890_976),
                                           ("huge", 952_531_008)])
def test_ditok_parameter_counts(size, decoder):
    tokenizer = 303_492_108
    assert parameter_count("ditok", vit_dec_model_size=size) == tokenizer + decoder
    width = {"base": 768, "large": 1024, "huge": 1280}[size]
    assert parameter_count("ditok", vit_dec_model_size=size, gamma_head=True) == (
        tokenizer + decoder + width + 1)


def random_params(net):
    shapes = jax.eval_shape(lambda: init_parameters(net, jax.random.key(0)))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda s: jnp.asarray(0.3 * rng.normal(size=s.shape), jnp.float32), shapes)


def test_a_fresh_network_predicts_zeros():
    net = build_model("jit", **TINY)
    out = net.apply({"params": init_parameters(net, jax.random.key(0))}, X, T, Y)
    assert out.x.shape == X.shape and out.x.dtype == jnp.float32 and not np.any(out.x)


def test_dropout_acts_in_the_middle_half_and_only_with_a_key():
    assert jit.middle_half(12).nonzero()[0].tolist() == [3, 4, 5, 6, 7, 8]
    assert jit.middle_half(32).sum() == 16
    still, wet = (build_model("jit", **TINY, proj_drop=rate) for rate in (0.0, 0.5))
    params = random_params(still)
    run = lambda net, key: net.apply({"params": params}, X, T, Y, dropout_key=key).x
    plain = run(still, None)
    np.testing.assert_array_equal(run(wet, None), plain)
    np.testing.assert_array_equal(run(still, jax.random.key(0)), plain)
    assert np.abs(run(wet, jax.random.key(0)) - plain).max() > 1e-3


def test_the_class_reaches_the_picture_by_both_roads():
    with_tokens = build_model("jit", **TINY)
    params = random_params(with_tokens)
    out = lambda y: with_tokens.apply({"params": params}, X, T, y).x
    assert np.abs(out(Y) - out(jnp.array([1, 3])))[0].max() > 1e-3
    assert np.abs(out(Y) - out(jnp.array([1, 3])))[1].max() == 0


@pytest.mark.parametrize("options, sentence", [
    (dict(in_context_start=4), "the blocks are 0 to 3"), (dict(attn_drop=0.1), "use proj_drop"),
    (dict(patch_size=3), "does not divide input_size"), (dict(num_heads=8), "multiple of 4"),
    (dict(proj_drop=1.0), "below 1"), (dict(remat="some"), "choose one of")])
def test_impossible_options_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        build_model("jit", **TINY | options)


def test_other_picture_sizes_are_refused():
    net = build_model("jit", **TINY)
    params = random_params(net)
    with pytest.raises(UserError, match=r"takes \[batch, 8, 8, 3\]"):
        net.apply({"params": params}, X[:, :4], T, Y)
    with pytest.raises(UserError, match="one time and one class each"):
        net.apply({"params": params}, X, T[:1], Y)
