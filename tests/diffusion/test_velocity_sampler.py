import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.diffusion import guidance, velocity_sampler
from pid_jax.errors import UserError

NOISE = jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, 2, 3)), jnp.float32)
KINDS = [("euler", "ode"), ("euler", "sde_mean"), ("euler", "sde"), ("euler", "sde_preserve"),
         ("heun", "ode"), ("heun_exact", "ode"), ("flowdpm", "ode")]


def to_point(x, t, scale):
    """The velocity of the straight path to the constant picture 0.5 (at any scale)."""
    return (0.5 - x) / (1.0 - t + 1e-6)


def curved(x, t, scale):
    """dx/dt = x: grows by e from 0 to 1."""
    return x


def sample(velocity, kind, steps=4, **options):
    table = velocity_sampler.make_table(steps, 1.0, **options)
    step_noise = lambda step: jnp.full_like(NOISE, 0.1) * step
    return velocity_sampler.sample(velocity, NOISE, table, *kind, step_noise)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_and_stepwise_loops_agree(kind):
    compiled = jax.jit(functools.partial(sample, curved, kind))()
    with jax.disable_jit():
        np.testing.assert_allclose(compiled, sample(curved, kind), atol=1e-6)


@pytest.mark.parametrize("kind", [k for k in KINDS if k[1] == "ode" and "heun" not in k[0]])
def test_straight_paths_end_exactly(kind):
    np.testing.assert_allclose(sample(to_point, kind, shift=2.0), np.full_like(NOISE, 0.5),
                               atol=1e-4)


def test_second_order_samplers_beat_euler():
    exact = NOISE * np.e
    errors = {kind: float(jnp.abs(sample(curved, (kind, "ode"), steps=20) - exact).max())
              for kind in velocity_sampler.SAMPLERS}
    assert all(errors[kind] < errors["euler"] / 5 for kind in errors if kind != "euler"), errors


def test_network_calls_per_step():
    calls = {"euler": 6, "heun": 6, "heun_exact": 11, "flowdpm": 6}
    for kind, expected in calls.items():
        made = []
        with jax.disable_jit():
            sample(lambda x, t, scale: made.append(t) or x, (kind, "ode"), steps=6)
        assert len(made) == expected, kind


def test_grid_ends_and_shift():
    grid = velocity_sampler.time_grid(4, shift=2.0, last_step=0.1)
    assert grid[0] == 0 and grid[-1] == 1 and np.all(np.diff(grid) > 0)
    assert velocity_sampler.time_grid(4)[2] == 0.5
    assert grid[1] == pytest.approx(0.3 / (0.3 + 0.7 * 2))


def test_guidance_acts_strictly_inside_its_interval():
    table = velocity_sampler.make_table(10, 3.0, interval=(0.1, 0.9))
    assert list(table.scales) == [1, 1, 3, 3, 3, 3, 3, 3, 3, 1, 1]


def test_outside_the_interval_one_half_of_the_batch_runs():
    sizes = []

    def predict(x, t, y):
        sizes.append(len(x))
        return x * y[:, None, None, None]

    velocity = guidance.guided_where_scaled(predict, jnp.ones(2), jnp.zeros(2))
    with jax.disable_jit():
        outside, inside = velocity(NOISE, 0.0, 1.0), velocity(NOISE, 0.5, 3.0)
    assert sizes == [2, 4]
    np.testing.assert_allclose(inside, 3 * outside, rtol=1e-6)


@pytest.mark.parametrize("call, words", [
    (lambda: velocity_sampler.time_grid(0), "1 to 10000 steps"),
    (lambda: velocity_sampler.time_grid(4, shift=0), "shift must be positive"),
    (lambda: velocity_sampler.time_grid(4, last_step=0), "last step must be above 0"),
    (lambda: velocity_sampler.make_table(4, float("inf")), "scale is inf"),
    (lambda: velocity_sampler.make_table(4, 2.0, interval=(0.9, 0.1)), "two rising times"),
    (lambda: velocity_sampler.make_table(4, 2.0, interval=(0.1,)), "two rising times"),
    (lambda: velocity_sampler.check_rule("dpm", "ode"), "sampler is 'dpm'"),
    (lambda: velocity_sampler.check_rule("heun", "sde"), "belongs to the sampler 'euler'"),
    (lambda: velocity_sampler.check_rule("euler", "sde", None), "draws noise at every step")])
def test_impossible_samplers_are_refused(call, words):
    with pytest.raises(UserError, match=words):
        call()
