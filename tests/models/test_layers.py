"""Norms, patches, positions, time and initial values against plain numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.models import blocks, layers


def normal(*shape, seed=0, std=1.0):
    return np.random.default_rng(seed).normal(size=shape, scale=std).astype(np.float32)


def test_rms_norm_of_small_inputs_shows_its_epsilon():
    x, scale = normal(2, 5, 16, std=1e-3), 1 + normal(16, seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(layers.rms_norm({"scale": scale}, x), expected, rtol=1e-5)


def test_rms_norm_on_another_axis():
    x, params = normal(2, 3, 8, 5), {"scale": normal(8)}
    moved = layers.rms_norm(params, x.swapaxes(-1, -2)).swapaxes(-1, -2)
    np.testing.assert_allclose(layers.rms_norm(params, x, axis=-2), moved, atol=1e-6)


def test_rms_norm_of_bfloat16_keeps_statistics_in_float32():
    x = jnp.full((1, 4096), 1.0, jnp.bfloat16)  # a bfloat16 sum of squares would stop at 256
    out = layers.rms_norm(layers.norm_init(4096), x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), 1.0, atol=1e-2)


def test_swiglu_width_is_rounded_down():
    assert [layers.swiglu_width(d) for d in (40, 48, 64, 1152)] == [106, 128, 170, 3072]


def test_patchify_order_is_channel_then_row_then_column():
    x = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    patches = layers.patchify(x, 2)
    assert patches.shape == (2, 6, 3, 4)
    for row in range(2):
        for column in range(3):
            corner = x[1, 2 * row:2 * row + 2, 2 * column:2 * column + 2]
            np.testing.assert_array_equal(patches[1, 3 * row + column],
                                          corner.transpose(2, 0, 1).reshape(3, 4))


def test_unpatchify_inverts_patchify():
    x = normal(2, 8, 12, 3)
    np.testing.assert_array_equal(layers.unpatchify(layers.patchify(x, 4), (2, 3), 4), x)


def test_pixel_positions_follow_the_full_image():
    grid, patch, channels = (2, 3), 4, 8
    omega = 10000.0 ** (-np.arange(channels // 4) / (channels / 4))
    column, row = (np.arange(n * patch)[:, None] * omega for n in grid[::-1])
    column, row = (np.concatenate([np.sin(a), np.cos(a)], -1) for a in (column, row))
    image = np.concatenate([np.broadcast_to(column[None], (8, 12, 4)),
                            np.broadcast_to(row[:, None], (8, 12, 4))], -1)
    expected = layers.patchify(image[None].astype(np.float32), patch)[0]
    np.testing.assert_allclose(layers.pixel_positions(grid, patch, channels), expected, atol=1e-7)


def test_time_frequencies_are_within_an_ulp_of_the_formula():
    exact = np.exp(-np.log(10.0) * np.arange(128) / 128)
    np.testing.assert_allclose(layers.time_frequencies(), exact, rtol=2.5e-7)


def test_modulation_parts_are_the_rows_of_their_leaf():
    params = layers.draw(jax.random.key(0), layers.modulation_spec(5, 7))
    parts = layers.unstack(params)
    assert len(parts) == 6
    np.testing.assert_array_equal(parts[4]["kernel"], params["kernel"][4])
    np.testing.assert_array_equal(parts[4]["bias"], params["bias"][4])


def test_initial_values_have_pytorchs_bounds():
    spec = {"linear": layers.linear_spec(64, 512), "mods": layers.modulation_spec(64, 512)}
    leaves = jax.tree.leaves(layers.draw(jax.random.key(0), spec))
    for leaf in leaves:
        assert 0.115 < np.abs(leaf).max() <= 1 / 8
    assert len(np.unique(np.concatenate([leaf.ravel() for leaf in leaves]))) > 200_000
    assert np.abs(layers.torch_uniform(jax.random.key(0), (3, 3, 16, 32))).max() <= 1 / 12


def test_draw_leaves_arrays_alone():
    spec = {"norm": layers.norm_init(3), "w": layers.Uniform((2,), 5)}
    drawn = layers.draw(jax.random.key(0), spec)
    np.testing.assert_array_equal(drawn["norm"]["scale"], 1)
    assert drawn["w"].shape == (2,)


def test_large_parameters_are_drawn_by_themselves(monkeypatch):
    monkeypatch.setattr(layers, "LARGE", 2**12)
    spec = {"a": layers.Uniform((64, 64), 2.0), "b": layers.Uniform((64, 64), 2.0),
            "c": layers.Uniform((7,), 1.0), "d": layers.norm_init(3)}
    drawn = layers.draw(jax.random.key(0), spec)
    assert abs(np.corrcoef(drawn["a"].ravel(), drawn["b"].ravel())[0, 1]) < 0.1
    for leaf in (drawn["a"], drawn["b"]):
        assert leaf.min() < -1.9 and leaf.max() > 1.9 and np.abs(leaf).max() < 2
    assert drawn["c"].shape == (7,) and np.all(drawn["d"]["scale"] == 1)
    only_large = layers.draw(jax.random.key(0), layers.Uniform((64, 64), 1.0))
    assert only_large.shape == (64, 64)


@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 7), (2, 3, 5, 7)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_product_has_the_gradients_of_a_matrix_product(shape, dtype):
    x, kernel, weight = (jax.random.normal(jax.random.key(i), size).astype(dtype) for i, size in
                         enumerate((shape, (7, 4), (*shape[:-1], 4))))
    loss = lambda product: lambda x, kernel: jnp.sum(jnp.sin(product(x, kernel)) * weight)
    found, expected = (jax.grad(loss(product), (0, 1))(x, kernel)
                       for product in (layers.product, jnp.matmul))
    tolerance = 1e-5 if dtype == "float32" else 0.05
    for ours, jaxs in zip(found, expected, strict=True):
        assert ours.dtype == jaxs.dtype
        np.testing.assert_allclose(np.float32(ours), np.float32(jaxs), atol=tolerance)


def test_product_has_second_derivatives():
    x, kernel = jnp.arange(6.0).reshape(2, 3), jnp.ones((3, 2))
    steepness = lambda product: jax.grad(lambda kernel: jnp.sum(jax.grad(
        lambda x: jnp.sum(product(x, kernel) ** 3))(x) ** 2))(kernel)
    np.testing.assert_allclose(steepness(layers.product), steepness(jnp.matmul), rtol=1e-5)


def test_gelu_is_the_exact_one():
    x = np.linspace(-12, 12, 4001)
    expected = x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    np.testing.assert_allclose(layers.gelu(jnp.float32(x)), expected, atol=1e-6)
    assert layers.gelu(jnp.bfloat16(x)).dtype == jnp.bfloat16


def test_channel_product_has_the_gradients_of_a_contraction():
    kernel, z, weight = normal(4, 3), normal(2, 5, 3, 6, seed=1), normal(2, 5, 4, 6, seed=2)
    plain = lambda kernel, z: jnp.einsum("oi,blip->blop", kernel, z)
    loss = lambda product: lambda kernel, z: jnp.sum(jnp.sin(product(kernel, z)) * weight)
    found, expected = (jax.value_and_grad(loss(product), (0, 1))(kernel, z)
                       for product in (blocks.channel_product, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
