import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax import models
from pid_jax.errors import UserError
from pid_jax.models import quantised
from pid_jax.models.layers import linear, unstack
from tests import drawing, tiny

# Half a step of 127, and of a float8's three bits of mantissa.
ROUNDING = {"int8": 0.5 / 127, "fp8": 2**-4}


@pytest.mark.parametrize("kind", quantised.DTYPES)
def test_rounding_stays_within_half_a_step_of_each_channel(kind):
    kernel = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 40, 5)), jnp.float32)
    kernel = kernel.at[..., 1].multiply(1e3).at[..., 2].set(0)
    found = quantised.quantise_kernel(kernel, kind)
    assert found.values.dtype.itemsize == 1 and found.scale.shape == (2, 3, 1, 5)
    largest = np.abs(kernel).max(axis=-2, keepdims=True)
    smallest = np.maximum(np.abs(kernel), largest / 256)  # below it, float8 steps are equal
    bound = ROUNDING[kind] * (largest if kind == "int8" else smallest)
    assert np.all(np.abs(found.astype(jnp.float32) - kernel) <= 1.001 * bound)


def test_layers_take_a_quantised_kernel_as_their_own():
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.standard_normal((3, 8, 4)), jnp.float32)
    small = quantised.quantise_kernel(kernel, "int8")
    x = jnp.asarray(rng.standard_normal((2, 8)), jnp.bfloat16)
    for i, part in enumerate(unstack({"kernel": small})):
        expected = linear({"kernel": small.astype(jnp.float32)[i]}, x)
        np.testing.assert_array_equal(linear(part, x), expected)


@pytest.mark.parametrize("kind", quantised.DTYPES)
def test_network_is_smaller_and_close(kind):
    net = models.build_model("pixeldit_t2i", **tiny.NETWORK)
    params = drawing.random_like(jax.eval_shape(
        lambda: models.init_parameters(net, jax.random.key(0))), 0)
    small = quantised.quantise(params, kind)
    sensitive = [name for name in params if name != "patch_blocks"] + ["adaLN_modulation_img"]
    for name in sensitive:
        before, after = (tree.get(name, tree["patch_blocks"].get(name)) for tree in (params, small))
        jax.tree.map(np.testing.assert_array_equal, before, after)
    assert quantised.stored_bytes(small["patch_blocks"]["mlp_x"]) < 0.4 * quantised.stored_bytes(
        params["patch_blocks"]["mlp_x"])
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((1, 16, 24, 3)), rng.standard_normal((1, 4, 16))
    run = jax.jit(lambda params: net.apply({"params": params}, x, jnp.full(1, 500.0), y).x)
    exact, close = run(params), run(small)
    relative = np.linalg.norm(close - exact) / np.linalg.norm(exact)
    assert 0 < relative < {"int8": 0.02, "fp8": 0.1}[kind]


def test_other_kinds_and_networks_are_refused():
    with pytest.raises(UserError, match="'int4'; choose one of int8, fp8"):
        quantised.quantise({}, "int4")
    with pytest.raises(UserError, match="this one has none"):
        quantised.quantise({"head": {"kernel": jnp.ones((2, 2))}}, "int8")
