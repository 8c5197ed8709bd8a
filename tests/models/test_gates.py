"""The sigma-aware gates against their formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.models import gates
from pid_jax.models.stacking import stacked_init


def random_gate(gate_type, dim=3, seed=0):
    rng = np.random.default_rng(seed)
    gate = gates.gate_init(jax.random.key(0), dim, gate_type)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), gate)


@pytest.mark.parametrize("gate_type, width", [("sigma_aware_per_token", 1),
                                              ("sigma_aware_per_token_per_dim", 3)])
def test_formula(gate_type, width):
    rng = np.random.default_rng(1)
    x, lq = rng.normal(size=(2, 2, 4, 3)).astype(np.float32)
    sigma = np.array([0.0, 0.7], np.float32)
    gate = random_gate(gate_type)
    content = np.concatenate([x, lq], -1) @ gate["content_proj"]["kernel"]
    assert content.shape[-1] == width
    closing = np.exp(gate["log_alpha"]) * sigma[:, None, None]
    opening = 1 / (1 + np.exp(-(content + gate["content_proj"]["bias"] - closing)))
    np.testing.assert_allclose(gates.sigma_aware_gate(gate, x, lq, sigma), x + opening * lq,
                               atol=1e-6)


def test_initial_gate_is_open_and_closes_with_sigma():
    gate = gates.gate_init(jax.random.key(0), 8, "sigma_aware_per_token")
    x, lq = jnp.zeros((1, 1, 8)), jnp.ones((1, 1, 8))
    openings = [float(gates.sigma_aware_gate(gate, x, lq, jnp.array([s]))[0, 0, 0])
                for s in (0.0, 0.4, 1.0)]
    np.testing.assert_allclose(openings, 1 / (1 + np.exp([-2.0, 0.0, 3.0])), atol=0.02)


def test_initial_values():
    init = functools.partial(gates.gate_init, dim=64, gate_type="sigma_aware_per_token_per_dim")
    gate = stacked_init(init, 3)(jax.random.key(0))
    np.testing.assert_allclose(gate["log_alpha"], np.full(3, np.log(5)), rtol=1e-6)
    np.testing.assert_array_equal(gate["content_proj"]["bias"], np.full((3, 64), 2.0))
    kernel = gate["content_proj"]["kernel"]
    assert kernel.shape == (3, 128, 64)
    assert abs(float(kernel.std()) - 0.01) < 5e-4
    assert not np.array_equal(kernel[0], kernel[1])


def test_low_precision_streams_keep_their_dtype():
    gate = gates.gate_init(jax.random.key(0), 4, "sigma_aware_per_token")
    x = jnp.ones((1, 2, 4), jnp.bfloat16)
    assert gates.sigma_aware_gate(gate, x, x, jnp.zeros(1)).dtype == jnp.bfloat16


def test_unknown_gate_type():
    with pytest.raises(UserError, match="lq_gate_type is 'tanh'; choose one of sigma_aware"):
        gates.gate_width("tanh", 8)


@pytest.mark.parametrize("gate_type", ["sigma_aware_per_token", "sigma_aware_per_token_per_dim"])
def test_every_gate_closes_step_by_step_as_sigma_grows(gate_type):
    gate = random_gate(gate_type)
    rng = np.random.default_rng(2)
    x, lq = rng.normal(size=(2, 1, 5, 3)).astype(np.float32)
    levels = np.linspace(0, 1, 11).astype(np.float32)
    opened = [(gates.sigma_aware_gate(gate, x, lq, jnp.array([s])) - x) / lq for s in levels]
    assert np.all(np.diff(np.stack(opened), axis=0) < 0) and np.all(opened[-1] > 0)
