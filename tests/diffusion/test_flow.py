import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.diffusion import flow, time_sampling
from pid_jax.errors import UserError


def pictures(seed, shape=(3, 4, 4, 2)):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_path_ends_at_picture_and_noise():
    x0, noise = pictures(0), pictures(1)
    np.testing.assert_array_equal(flow.interpolate(x0, noise, np.zeros(3)), x0)
    np.testing.assert_array_equal(flow.interpolate(x0, noise, np.ones(3), 0.1), noise)


def test_velocity_is_the_slope_of_the_path():
    x0, noise = pictures(0), pictures(1)
    low, high = (flow.interpolate(x0, noise, t, 0.01) for t in (0.25, 0.75))
    np.testing.assert_allclose((high - low) / 0.5, flow.velocity_target(x0, noise, 0.01), atol=1e-5)


def test_conversions_invert_each_other_above_the_clamp():
    x_t, velocity, t = pictures(0), pictures(1), np.float32([0.05, 0.4, 1.0])
    x0 = flow.x0_from_velocity(velocity, x_t, t)
    np.testing.assert_allclose(flow.velocity_from_x0(x0, x_t, t), velocity, atol=2e-5)


def test_below_the_clamp_a_predicted_picture_is_divided_by_the_floor():
    x0, x_t = pictures(0), pictures(1)
    small = flow.velocity_from_x0(x0, x_t, np.float32([0.0, 0.01, 0.05]))
    np.testing.assert_allclose(small, (x_t - x0) / np.float32(0.05), rtol=1e-6)


def test_perfect_predictions_have_no_loss():
    x0, noise, t = pictures(0), pictures(1), np.float32([0.1, 0.5, 0.9])
    x_t = flow.interpolate(x0, noise, t)
    assert flow.flow_loss(noise - x0, x_t, x0, noise, t) == 0.0
    assert flow.flow_loss(x0, x_t, x0, noise, t, "x0") < 1e-10


def test_unknown_prediction_is_refused():
    with pytest.raises(UserError, match="'noise'"):
        flow.predicted_x0(pictures(0), pictures(1), 0.5, "noise")


def test_network_time_is_float32():
    assert flow.network_time(np.float64(0.3)).dtype == jnp.float32


def test_shift_keeps_ends_and_is_identity_at_one():
    t = np.linspace(0, 1, 9)
    np.testing.assert_array_equal(time_sampling.shift_time(t, 1.0), t)
    shifted = time_sampling.shift_time(t, 6.0)
    assert shifted.dtype == np.float64 and shifted[0] == 0 and shifted[-1] == 1
    assert np.all(shifted[1:-1] > t[1:-1])


@pytest.mark.parametrize("distribution", time_sampling.DISTRIBUTIONS)
def test_sampled_times_follow_the_distribution(distribution):
    sampler = time_sampling.TimeSampler(distribution, exponent=2.0, alpha=2.0, beta=1.0)
    times = np.asarray(sampler(jax.random.key(0), 20_000))
    expected = {"logit_normal": 0.5, "power": 2 / 3, "beta": 2 / 3}[distribution]
    assert times.dtype == np.float32 and times.min() >= 0 and times.max() <= 1
    assert abs(times.mean() - expected) < 0.01


def test_times_are_clipped_and_names_checked():
    times = time_sampling.TimeSampler(std=9.0, minimum=0.02, maximum=0.99)(jax.random.key(1), 500)
    assert times.min() == np.float32(0.02) and times.max() == np.float32(0.99)
    with pytest.raises(UserError, match="uniform"):
        time_sampling.TimeSampler("uniform")
