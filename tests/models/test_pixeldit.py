"""PixelDiT as a whole: outputs, taps, early exit, remat, precision, initial values, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.models import build_model, init_parameters
from tests.double_precision import RELATIVE, double_precision

TINY = dict(num_groups=2, hidden_size=16, pixel_hidden_size=4, pixel_attn_hidden_size=8,
            pixel_num_groups=1, patch_depth=3, pixel_depth=1, patch_size=4, txt_embed_dim=6,
            txt_max_length=5)
ED = dict(enable_ed=True, ed_compress_ratio=2, ed_hidden_size=12, ed_num_heads=3)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X, T, Y = normal(2, 8, 16, 3), jnp.array([100.0, 900.0]), normal(2, 4, 6, seed=1)


def tiny(**options):
    return build_model("pixeldit_t2i", **TINY | options)


def random_params(net, std):
    """Parameters that are all different from zero."""
    shapes = jax.eval_shape(lambda key: init_parameters(net, key), jax.random.key(0))
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: jnp.asarray(std * rng.normal(size=x.shape), jnp.float32), shapes)


@pytest.fixture(scope="module")
def params():
    return random_params(tiny(), std=0.3)


def test_a_fresh_network_predicts_zeros_in_float32():
    net = tiny(dtype=jnp.bfloat16)
    out = net.apply({"params": init_parameters(net, jax.random.key(0))}, X, T, Y)
    assert out.x.shape == X.shape and out.x.dtype == jnp.float32
    assert not np.any(out.x)
    assert out.features == () and out.repa_tokens.shape == (2, 8, 16)


def test_parameters_are_float32_unless_asked_otherwise():
    for net, dtype in ((tiny(dtype=jnp.bfloat16), "float32"),
                       (tiny(param_dtype="bfloat16"), "bfloat16")):
        shapes = jax.eval_shape(lambda key: init_parameters(net, key), jax.random.key(0))
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(shapes)} == {dtype}


def test_features_and_early_exit(params):
    net = tiny()
    full = net.apply({"params": params}, X, T, Y, feature_indices=(0, 2))
    early = net.apply({"params": params}, X, T, Y, feature_indices=(2, 0),
                      return_features_early=True)
    assert early.x is None and full.x is not None
    for a, b in zip(full.features, early.features, strict=True):
        assert a.shape == (2, 2, 4, 16)
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_repa_tokens_are_those_of_the_one_based_block(params):
    tapped = tiny(repa_encoder_index=2).apply({"params": params}, X, T, Y)
    features = tiny().apply({"params": params}, X, T, Y, feature_indices=(1,)).features
    np.testing.assert_allclose(tapped.repa_tokens, features[0].reshape(2, 8, 16), atol=1e-6)


def loss_and_gradients(options, remat, params):
    def loss(params):
        out = tiny(**options | {"remat": remat}).apply({"params": params}, X, T, Y)
        return jnp.sum(out.x**2) + jnp.sum(out.repa_tokens)

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("options, policies", [({}, ("full", "attention")), (ED, ("full",))],
                         ids=["plain", "encoder-decoder"])
def test_remat_changes_no_value_and_no_gradient(options, policies):
    params = random_params(tiny(**options), std=0.1)
    expected = loss_and_gradients(options, "none", params)
    for remat in policies:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
                     loss_and_gradients(options, remat, params), expected)


@pytest.mark.parametrize("chunks, parts", [(4, 4), (6, 2), (3, 1)])
def test_chunks_change_no_value_and_no_gradient(params, chunks, parts):
    with double_precision():
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        expected, actual = (loss_and_gradients({"dtype": jnp.float64} | options, remat, wide)
                            for options, remat in (({}, "none"), ({"pit_chunks": chunks}, "full")))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(
        a, b, rtol=0, atol=RELATIVE * np.abs(b).max()), actual, expected)
    traced = jax.make_jaxpr(lambda: tiny(pit_chunks=chunks).apply({"params": params}, X, T, Y).x)()
    assert (f"f32[{parts},2,{8 // parts},4,16]" in str(traced)) == (parts > 1)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_unrolled_blocks_have_the_same_values_and_gradients(params, remat):
    expected = loss_and_gradients({}, "none", params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
                 loss_and_gradients({"unroll": 2}, remat, params), expected)


def test_remat_attention_saves_the_attention_outputs_only(params):
    def residuals(remat):
        forward = lambda p: jnp.sum(tiny(remat=remat).apply({"params": p}, X, T, Y).x)
        _, pullback = jax.vjp(forward, params)
        return sum(x.size for x in jax.tree.leaves(pullback))

    assert residuals("full") < residuals("attention") < residuals("none")


def test_bfloat16_is_finite_and_close(params):
    exact = tiny().apply({"params": params}, X, T, Y).x
    rough = tiny(dtype=jnp.bfloat16).apply({"params": params}, X, T, Y).x
    assert np.all(np.isfinite(rough))
    assert np.abs(rough - exact).mean() < 0.05 * exact.std()


def test_attention_is_injected(params):
    calls = []

    def attention(q, k, v, text_q=None, text_k=None, text_v=None, key_mask=None):
        calls.append((q.shape, None if text_q is None else text_q.shape))
        return v, text_v

    tiny(attention=attention).apply({"params": params}, X, T, Y)
    assert set(calls) == {((2, 8, 2, 8), (2, 4, 2, 8)), ((2, 8, 1, 8), None)}


def test_the_last_text_half_gets_no_gradient(params):
    loss = lambda params: jnp.sum(tiny().apply({"params": params}, X, T, Y).x ** 2)
    grads = jax.jit(jax.grad(loss))(params)["patch_blocks"]
    for leaf in jax.tree.leaves([grads["attn"]["proj_y"], grads["norm_y2"], grads["mlp_y"]]):
        assert not np.any(leaf[-1]) and np.any(leaf[0])


@pytest.mark.parametrize("options, words", [
    (dict(num_groups=3), "num_groups is 3, which does not divide hidden_size 16"),
    (dict(num_groups=8), "a multiple of 4"),
    (dict(pixel_num_groups=3), "does not divide pixel_attn_hidden_size 8"),
    (dict(pixel_hidden_size=6), "pixel_hidden_size is 6"),
    (dict(rope_mode="ntk"), "rope_mode is 'ntk'; choose one of original, ntk_aware"),
    (dict(rope_mode="ntk_aware", rope_ref_h=2), "at least patch_size"),
    (dict(rope_mode="ntk_aware", num_groups=4), "at least 8 channels"),
    (dict(remat="some"), "remat is 'some'"),
    (dict(pit_chunks=0), "pit_chunks is 0"),
    (dict(unroll=0), "unroll is 0"),
    (dict(patch_depth=0), "patch_depth is 0"),
    (dict(pixel_hidden_size=0), "pixel_hidden_size is 0"),
    (dict(txt_embed_dim=0), "txt_embed_dim is 0"),
    (dict(text_rope_theta=0.0), "text_rope_theta is 0.0"),
    (dict(in_channels=4), "images have 3 channels"),
    (dict(enable_ed=True, ed_compress_ratio=3), "power of two"),
    (dict(enable_ed=True, ed_num_heads=3), "ed_num_heads 3"),
    (dict(hiden_size=3), "did you mean 'hidden_size'"),
])
def test_bad_options_are_refused_with_a_sentence(options, words):
    with pytest.raises(UserError, match=words):
        tiny(**options)


def test_an_unknown_model_is_refused():
    with pytest.raises(UserError, match="did you mean 'pixeldit_t2i'"):
        build_model("pixeldit_t2")


@pytest.mark.parametrize("changes, words", [
    (dict(x=X[:, :6]), "image size 6 x 16 is not a multiple of patch_size 4"),
    (dict(x=X[..., :2]), r"expected \[batch, height, width, 3\]"),
    (dict(y=Y[..., :5]), "txt_embed_dim"),
    (dict(t=T[:1]), "one time and one caption per image"),
    (dict(y=Y[:1]), "one time and one caption per image"),
    (dict(feature_indices=(3,)), "the patch blocks are 0 to 2"),
    (dict(return_features_early=True), "needs feature_indices"),
    (dict(mask=jnp.ones((2, 8), jnp.int32)), "mask is int32"),
    (dict(mask=jnp.ones((2, 5), bool)), "one entry a patch"),
    (dict(x=X[:, :4, :8], mask=jnp.ones((2, 2), bool)), "leave it out"),
])
def test_bad_inputs_are_refused_with_a_sentence(params, changes, words):
    with pytest.raises(UserError, match=words):
        tiny().apply({"params": params}, **{"x": X, "t": T, "y": Y} | changes)
