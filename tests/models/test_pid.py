"""PidNet beside its backbone: initial equality, injection places, sigma, and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.models import build_model, init_parameters

BACKBONE = dict(num_groups=2, hidden_size=16, pixel_hidden_size=4, pixel_attn_hidden_size=8,
                pixel_num_groups=1, patch_depth=3, pixel_depth=1, patch_size=4, txt_embed_dim=6,
                txt_max_length=5, rope_mode="original")
LQ = dict(lq_hidden_dim=8, lq_latent_channels=3, lq_num_res_blocks=1, sr_scale=2,
          latent_spatial_down_factor=4, pit_lq_inject=True)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X, T, Y = normal(2, 8, 12, 3), jnp.array([100.0, 900.0]), normal(2, 4, 6, seed=1)
LATENT, SIGMA = normal(2, 1, 2, 3, seed=2), jnp.array([0.0, 0.5])


WITH_LQ = {"lq_latent": LATENT, "degrade_sigma": SIGMA}


def pidnet(**options):
    return build_model("pidnet", **{**BACKBONE, **LQ, **options})


def random_params(net):
    """Parameters of order 0.3: none of them zero."""
    shapes = jax.eval_shape(lambda key: init_parameters(net, key), jax.random.key(0))
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32), shapes)


def run(net, params, **inputs):
    return net.apply({"params": params}, X, T, Y, **inputs)


@functools.cache
def compiled(name):
    """One program a network (params, inputs -> output with the features of all blocks)."""
    net = pidnet() if name == "pidnet" else build_model(name, **BACKBONE)
    blocks = tuple(range(net.patch_depth))
    return jax.jit(lambda params, inputs: run(net, params, **inputs, feature_indices=blocks))


def predict(params, **inputs):
    return compiled("pidnet")(params, inputs)


def predict_backbone(params):
    own = {name: params[name] for name in params if name not in ("lq_proj", "pit_lq_gate")}
    return compiled("pixeldit_t2i")(own, {})


@pytest.fixture
def params():
    return random_params(pidnet())


def test_with_zero_heads_the_network_draws_what_its_backbone_draws(params):
    """Zero heads are what `LqProjection` starts with (see test_lq_projection)."""
    heads = {name: jax.tree.map(jnp.zeros_like, params["lq_proj"][name])
             for name in ("output_heads", "pit_head")}
    with_lq = predict({**params, "lq_proj": params["lq_proj"] | heads}, **WITH_LQ)
    np.testing.assert_allclose(with_lq.x, predict_backbone(params).x, atol=1e-5)
    assert jnp.abs(predict(params, **WITH_LQ).x - with_lq.x).max() > 1e-3


def test_without_lq_input_the_gates_are_skipped(params):
    np.testing.assert_allclose(predict(params).x, predict_backbone(params).x, atol=1e-5)


def test_sigma_changes_its_own_sample_only(params):
    one, other = (predict(params, lq_latent=LATENT, degrade_sigma=jnp.array([0.2, s])).x
                  for s in (0.1, 0.9))
    np.testing.assert_array_equal(one[0], other[0])
    assert jnp.abs(one[1] - other[1]).max() > 1e-4


@pytest.mark.parametrize("gate, touched", [(0, [True, True, True]), (1, [False, False, True])])
def test_injection_comes_before_every_second_block(params, gate, touched):
    before = predict(params, **WITH_LQ).features
    heads = params["lq_proj"]["output_heads"]
    heads["bias"] = heads["bias"].at[gate].add(1.0)
    after = predict(params, **WITH_LQ).features
    assert [bool((a != b).any()) for a, b in zip(before, after)] == touched


def test_the_pit_head_reaches_the_output_past_the_patch_blocks(params):
    before = predict(params, **WITH_LQ)
    params["lq_proj"]["pit_head"]["bias"] += 1
    after = predict(params, **WITH_LQ)
    np.testing.assert_array_equal(before.features[-1], after.features[-1])
    assert jnp.abs(before.x - after.x).max() > 1e-4


@pytest.mark.parametrize("interval, depth, gates", [(1, 3, 3), (2, 3, 2), (3, 3, 1), (2, 4, 2),
                                                    (5, 3, 1), (0, 3, 3)])
def test_one_gate_per_interval(interval, depth, gates):
    net = pidnet(lq_interval=interval, patch_depth=depth)
    shapes = jax.eval_shape(lambda key: init_parameters(net, key), jax.random.key(0))
    assert shapes["lq_proj"]["output_heads"]["kernel"].shape == (gates, 8, 16)
    assert shapes["lq_proj"]["gate_modules"]["log_alpha"].shape == (gates,)


def test_aux_picture_comes_only_when_asked_for():
    net = pidnet(lq_aux_rgb_head=True)
    shape = lambda **ask: jax.eval_shape(lambda p: run(net, p, **WITH_LQ, **ask).lq_rgb,
                                         random_params(net))
    assert shape() is None
    assert shape(return_lq_aux=True).shape == (2, 4, 6, 3)


@pytest.mark.parametrize("remat", ["none", "full", "attention"])
def test_gradients_trace_under_every_remat_policy(params, remat):
    net = pidnet(remat=remat)
    loss = lambda p: jnp.sum(run(net, p, **WITH_LQ).x ** 2)
    assert jax.tree.structure(jax.eval_shape(jax.grad(loss), params)) == jax.tree.structure(params)


def test_low_precision_returns_float32(params):
    net = pidnet(dtype=jnp.bfloat16)
    out = jax.eval_shape(lambda p: run(net, p, **WITH_LQ, feature_indices=(1,)), params)
    assert out.x.dtype == jnp.float32 and out.features[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("inputs, message", [
    ({"degrade_sigma": SIGMA}, "PidNet needs lq_latent .or lq_image.: degrade_sigma came without"),
    ({"lq_mask": SIGMA, "return_lq_aux": True}, "lq_mask, return_lq_aux came without"),
    ({"lq_latent": LATENT}, "PidNet needs degrade_sigma beside the LQ input"),
    ({"lq_latent": LATENT, "degrade_sigma": jnp.zeros((2, 1))}, "expected one value per sample"),
    ({"lq_latent": LATENT, "degrade_sigma": jnp.zeros(3)}, "batch sizes differ: x 2, lq_latent 2"),
    ({**WITH_LQ, "lq_mask": jnp.ones((2, 1))}, "lq_mask has shape .* one value per sample"),
    ({**WITH_LQ, "lq_mask": jnp.ones(3)}, "batch sizes differ: .* lq_mask 3"),
    ({"lq_latent": LATENT[:1], "degrade_sigma": SIGMA}, "batch sizes differ: x 2, lq_latent 1"),
    ({"lq_latent": normal(2, 1, 2, 16), "degrade_sigma": SIGMA}, "16 channels .* expects 3"),
])
def test_inputs_that_do_not_fit(params, inputs, message):
    with pytest.raises(UserError, match=message):
        run(pidnet(), params, **inputs)


def test_image_size_is_checked_before_the_lq_branch(params):
    with pytest.raises(UserError, match="not a multiple of patch_size"):
        pidnet().apply({"params": params}, normal(2, 9, 12, 3), T, Y, **WITH_LQ)


def test_encoder_decoder_takes_no_lq_input():
    net = pidnet(enable_ed=True, ed_compress_ratio=2, ed_hidden_size=16, ed_num_heads=2)
    params = random_params(net)
    with pytest.raises(UserError, match="enable_ed"):
        run(net, params, **WITH_LQ)


@pytest.mark.parametrize("options, message", [
    (dict(lq_inject_mode="concat"), "lq_inject_mode is 'concat'"),
    (dict(sr_scale=0), "sr_scale is 0"),
    (dict(lq_gate_type="fixed"), "lq_gate_type is 'fixed'"),
    (dict(lq_latent_chanels=3), "no option 'lq_latent_chanels' .did you mean 'lq_latent_channels'"),
])
def test_options_that_do_not_fit(options, message):
    with pytest.raises(UserError, match=message):
        pidnet(**options)
