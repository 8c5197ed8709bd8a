"""The evaluation table of Euler and Heun, guidance in an interval, and the path of JiT."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.diffusion import clean_flow, heun
from pid_jax.errors import UserError


def test_heun_with_50_steps_costs_99_evaluations():
    table = heun.make_table(50, "heun")
    assert len(table.times) == 99 and table.ends.sum() == 50 and not table.guided
    assert len(heun.make_table(50, "euler").times) == 50
    assert table.previous[-1] == 0  # the last step is Euler's
    assert heun.make_table(50, "heun", 2.0).guided


def test_the_interval_is_open_at_both_ends_but_starts_at_zero():
    at = lambda t, interval: heun.guided_scale(t, 3.0, interval)
    assert [at(t, (0.2, 0.8)) for t in (0.0, 0.2, 0.5, 0.8, 1.0)] == [1.0, 1.0, 3.0, 1.0, 1.0]
    assert at(0.0, (0.0, 1.0)) == 3.0 and at(1.0, (0.0, 1.0)) == 1.0


def test_boundaries_on_the_grid_lie_outside():
    scales = heun.make_table(10, "euler", 2.0, (0.0, 0.9)).scales
    assert scales.tolist() == [2.0] * 9 + [1.0]
    scales = heun.make_table(10, "euler", 2.0, (0.3, 0.9)).scales  # 3 tenths are above 0.3
    assert scales.tolist() == [1.0] * 4 + [2.0] * 5 + [1.0]


def test_heun_is_exact_for_velocities_linear_in_time():
    table = heun.make_table(4, "heun")
    end = heun.solve(lambda z, t, scale: jnp.broadcast_to(t[:, None], z.shape), jnp.zeros((2, 1)),
                     table)
    # Trapezia are exact up to the last, explicit step: it misses half a step squared.
    np.testing.assert_allclose(end, 0.5 - 0.25**2 / 2, atol=1e-6)


def test_guidance_mixes_only_inside_the_interval():
    seen = []

    def predict(z, t, condition):
        seen.append(z.shape[0])
        return jnp.broadcast_to(condition[:, None], z.shape)

    table = heun.make_table(4, "euler", 3.0, (0.4, 1.0))  # guided at 0.5 and 0.75
    velocity = heun.guided_in_interval(predict, jnp.array([1.0]), jnp.array([0.0]), table)
    np.testing.assert_allclose(heun.solve(velocity, jnp.zeros((1, 1)), table), 2.0, atol=1e-6)
    assert sorted(set(seen)) == [1, 2]
    seen.clear()
    table = heun.make_table(4, "heun")
    plain = heun.guided_in_interval(predict, jnp.array([1.0]), jnp.array([0.0]), table)
    heun.solve(plain, jnp.zeros((1, 1)), table)
    assert set(seen) == {1}  # the unconditional side is not even traced


@pytest.mark.parametrize("arguments, sentence", [
    ((0, "heun"), "1 to 10000 steps"), ((10**9, "euler"), "1 to 10000 steps"),
    ((4, "rk4"), "choose one of euler, heun"), ((4, "heun", float("nan")), "scale is nan"),
    ((4, "heun", 2.0, (0.8, 0.2)), "two rising times")])
def test_impossible_tables_are_refused(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        heun.make_table(*arguments)


def test_the_path_runs_from_noise_to_picture():
    x, noise = jnp.full((2, 1), 3.0), jnp.full((2, 1), 0.5)
    z = clean_flow.noised(x, noise, jnp.array([0.0, 1.0]), noise_scale=2.0)
    np.testing.assert_allclose(z[:, 0], [1.0, 3.0])
    speed = clean_flow.velocity(x, z, jnp.array([0.0, 1.0]), 0.05)
    np.testing.assert_allclose(speed[:, 0], [2.0, 0.0])
    late = clean_flow.velocity(x, noise, jnp.array([0.99, 0.99]), 0.05)
    np.testing.assert_allclose(late, 2.5 / 0.05, rtol=1e-6)  # clamped
    times = clean_flow.times_of(jnp.zeros(3), -0.8, 0.8)
    np.testing.assert_allclose(times, 1 / (1 + np.exp(0.8)), rtol=1e-6)


def test_labels_drop_below_the_probability():
    dropped = clean_flow.drop_labels(jnp.array([4, 4]), jnp.array([0.05, 0.1]), 0.1, null=9)
    assert dropped.tolist() == [9, 4]
    uniform = jax.random.uniform(jax.random.key(0), (4000,))
    share = np.mean(clean_flow.drop_labels(jnp.zeros(4000, int), uniform, 0.1, null=9) == 9)
    assert 0.08 < share < 0.12
