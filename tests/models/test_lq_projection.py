"""The LQ branch: alignment, initial values, masks and refusals."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.models import lq_projection
from pid_jax.models.lq_projection import LqProjection

TINY = dict(out_dim=12, hidden_dim=8, num_outputs=2, patch_size=4, sr_scale=2,
            latent_spatial_down_factor=4, in_channels=0, latent_channels=3, num_res_blocks=2,
            latent_unpatchify_factor=1, aux_rgb_head=False, aux_rgb_head_latent_block_idx=-1,
            conv_padding_mode="zeros", gate_type="sigma_aware_per_token", zero_init=True,
            pit_output=False)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def build(**options):
    """A branch, and parameters of order 0.3 in the shapes that it initialises."""
    rng = np.random.default_rng(0)
    net = LqProjection(**{**TINY, **options})
    shapes = jax.eval_shape(net.init, jax.random.key(0))
    return net, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3, jnp.float32),
                             shapes)


def initial_params(**options):
    return jax.jit(LqProjection(**{**TINY, **options}).init)(jax.random.key(0))


@pytest.mark.parametrize("options, size", [
    (dict(), (2, 3)),
    (dict(), (3, 5)),
    (dict(latent_spatial_down_factor=2), (4, 6)),
    (dict(latent_spatial_down_factor=2), (5, 3)),
    (dict(latent_spatial_down_factor=1), (8, 12)),
    (dict(sr_scale=1, latent_spatial_down_factor=1), (11, 9)),
    (dict(latent_channels=12, latent_spatial_down_factor=8, latent_unpatchify_factor=2), (1, 2)),
])
def test_every_alignment_gives_one_feature_per_token(options, size):
    net, params = build(**options)
    latent = normal(2, *size, net.latent_channels)
    shared = net(params, (4, 6), latent).shared
    assert shared.shape == (2, 24, 8)
    assert np.isfinite(shared).all()


def test_fold_puts_cells_into_channels():
    latent = normal(1, 4, 6, 2)
    aligned = np.asarray(lq_projection.align_latent(latent, (2, 3), 1, Fraction(1, 2)))
    np.testing.assert_array_equal(aligned[0, 1, 2], latent[0, 2:4, 4:6].transpose(2, 0, 1).ravel())


def test_initial_heads_are_zero_and_initial_convolutions_small():
    params = initial_params(hidden_dim=32, pit_output=True, num_res_blocks=0)
    for head in (params["output_heads"], params["pit_head"]):
        assert all(not leaf.any() for leaf in jax.tree.leaves(head))
    conv = params["latent_proj"]["conv_out"]
    assert abs(float(conv["kernel"].std()) - 0.02) < 1e-3
    assert not conv["bias"].any()


def test_heads_can_start_small_instead():
    head = lq_projection.head_init(jax.random.key(0), 64, 48, zero=False)
    assert abs(float(head["kernel"].std()) - 0.02) < 1e-3
    assert not head["bias"].any()


def test_mask_zeroes_the_features_of_one_sample_only():
    _, params = build(pit_output=True)
    shared = jnp.asarray(normal(2, 24, 8))
    free = lq_projection.read_head(params["pit_head"], shared, None)
    masked = lq_projection.read_head(params["pit_head"], shared, jnp.array([1.0, 0.0]))
    np.testing.assert_array_equal(masked[0], free[0])
    assert free[1].any() and not masked[1].any()


def test_aux_head_reads_the_block_it_names():
    for tap, changes in ((1, False), (2, True), (-1, True)):
        net, params = build(aux_rgb_head=True, aux_rgb_head_latent_block_idx=tap)
        latent = normal(1, 2, 3, 3)
        before = net(params, (4, 6), latent, with_rgb=True).rgb
        assert before.shape == (1, 8, 12, 3)
        params["latent_proj"]["res_block_1"]["conv2"]["bias"] *= 9
        after = net(params, (4, 6), latent, with_rgb=True).rgb
        assert bool(jnp.abs(after - before).max() > 1e-3) == changes


def test_one_branch_alone_skips_the_merge():
    net, params = build(in_channels=3)
    no_merge = {**params, "merge": jax.tree.map(lambda x: x * jnp.nan, params["merge"])}
    for inputs in ({"lq_latent": normal(1, 2, 3, 3)}, {"lq_image": normal(1, 8, 12, 3)}):
        assert np.isfinite(net(no_merge, (4, 6), **inputs).shared).all()
    both = {"lq_latent": normal(1, 2, 3, 3), "lq_image": normal(1, 7, 12, 3)}
    assert np.isnan(net(no_merge, (4, 6), **both).shared).all()
    assert np.isfinite(net(params, (4, 6), **both).shared).all()


@pytest.mark.parametrize("options, message", [
    (dict(conv_padding_mode="same"), "lq_conv_padding_mode is 'same'; choose one of zeros"),
    (dict(gate_type="fixed"), "lq_gate_type is 'fixed'; choose one of"),
    (dict(hidden_dim=10), "lq_hidden_dim is 10"),
    (dict(hidden_dim=0), "lq_hidden_dim is 0"),
    (dict(in_channels=-1), "lq_in_channels is -1 and lq_latent_channels .*; they must be"),
    (dict(num_res_blocks=-1), "lq_num_res_blocks is -1"),
    (dict(latent_unpatchify_factor=0), "lq_latent_unpatchify_factor is 0"),
    (dict(latent_channels=0), "the LQ branch has no input"),
    (dict(latent_channels=6, latent_unpatchify_factor=2), "needs a multiple of 4"),
    (dict(patch_size=6, latent_spatial_down_factor=2), "one latent cell covers 2/3 patches"),
    (dict(aux_rgb_head=True, patch_size=9, sr_scale=6), "patch_size 9 is not a multiple of sr_sc"),
    (dict(aux_rgb_head=True, aux_rgb_head_latent_block_idx=3), "choose -1 .* or a ResBlock from 1"),
])
def test_options_that_do_not_fit(options, message):
    with pytest.raises(UserError, match=message):
        LqProjection(**{**TINY, **options})


@pytest.mark.parametrize("options, inputs, message", [
    ({}, {"lq_latent": normal(1, 2, 3, 16)}, "has 16 channels .* expects 3 .*latent family"),
    ({}, {"lq_latent": normal(2, 3, 3)}, "expected .batch, height, width, channels"),
    ({}, {"lq_latent": normal(1, 2, 3, 3), "lq_image": normal(1, 8, 12, 3)},
     "lq_image was given to a network without that branch"),
    ({}, {"lq_latent": normal(1, 2, 3, 3), "with_rgb": True}, "needs the auxiliary head"),
    (dict(in_channels=3, aux_rgb_head=True, aux_rgb_head_latent_block_idx=1),
     {"lq_image": normal(1, 8, 12, 3), "with_rgb": True}, "reads the latent branch"),
])
def test_inputs_that_do_not_fit(options, inputs, message):
    net, params = build(**options)
    with pytest.raises(UserError, match=message):
        net(params, (4, 6), **inputs)


def test_reflect_on_one_row_of_patches_is_refused():
    net, params = build(conv_padding_mode="reflect")
    with pytest.raises(UserError, match="reflect padding by 1 needs a grid of at least 2x2"):
        net(params, (1, 6), normal(1, 1, 3, 3))
