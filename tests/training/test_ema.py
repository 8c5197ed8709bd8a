import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.training import ema

SPECS = (ema.EmaSpec("wide", rate=0.1), ema.EmaSpec("narrow", rate=0.05),
         ema.EmaSpec("flat", kind="constant", decay=0.5))


def test_power_averages_weigh_iterations_by_their_power():
    """After many updates the average of the iteration number is close to its closed form."""
    averages = ema.init_ema({"w": jnp.zeros(())}, SPECS)
    update = jax.jit(ema.update_ema, static_argnums=3)
    for iteration in range(300):
        averages = update(averages, {"w": jnp.float32(iteration)}, iteration, SPECS)
    mean = lambda e: (e + 1) / (e + 2) * 299
    np.testing.assert_allclose(averages["wide"]["w"], mean(6.937), rtol=5e-3)
    np.testing.assert_allclose(averages["narrow"]["w"], mean(16.972), rtol=5e-3)
    np.testing.assert_allclose(averages["flat"]["w"], 298.0, rtol=1e-3)


def test_first_power_update_copies_and_constant_blends():
    start, new = {"w": jnp.full((2,), 3.0)}, {"w": jnp.full((2,), 0.1, jnp.bfloat16)}
    averages = ema.update_ema(ema.init_ema(start, SPECS), new, 0, SPECS)
    np.testing.assert_array_equal(averages["wide"]["w"], new["w"].astype(jnp.float32))
    np.testing.assert_allclose(averages["flat"]["w"], (3.0 + np.float32(new["w"][0])) / 2)


def test_averages_are_float32_copies():
    weights = {"w": jnp.ones(4)}
    averages = ema.init_ema(weights, SPECS)
    assert averages["wide"]["w"].unsafe_buffer_pointer() != weights["w"].unsafe_buffer_pointer()
    assert ema.init_ema({"w": jnp.ones(2, jnp.bfloat16)}, SPECS)["flat"]["w"].dtype == jnp.float32


def test_bad_specs_are_refused():
    with pytest.raises(UserError, match="linear"):
        ema.EmaSpec(kind="linear")
    with pytest.raises(UserError, match="decay 2"):
        ema.EmaSpec(decay=2)
    with pytest.raises(UserError, match="differ"):
        ema.init_ema({}, (ema.EmaSpec("a"), ema.EmaSpec("a")))


def test_a_rate_that_no_average_has_is_refused_early():
    with pytest.raises(UserError, match="the EMA rate is 5"):
        ema.EmaSpec(rate=5)
