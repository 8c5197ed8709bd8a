import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.diffusion import dpm_solver, few_step, guidance
from pid_jax.errors import UserError

NOISE = np.random.default_rng(0).standard_normal((2, 3, 3, 1)).astype(np.float32)


def gaussian_velocity(x, t):
    """The exact velocity when pictures are N(0, 1/4): alpha^2/4 + sigma^2 is the variance."""
    t = t[:, None, None, None]
    variance = (1 - t) ** 2 / 4 + t**2
    return x * (t - (1 - t) / 4) / variance


def gaussian_x0(x, t):
    return x - t[:, None, None, None] * gaussian_velocity(x, t)


def gaussian_flow(start, x):
    """Where the exact flow takes x from `start` to t = 0: standard deviations scale."""
    return x * 0.5 / np.sqrt((1 - start) ** 2 / 4 + start**2)


def dpm_error(steps, order):
    table = dpm_solver.make_table(steps, 1.0, order)
    got = dpm_solver.solve(gaussian_velocity, NOISE, table)
    return np.abs(got - gaussian_flow(dpm_solver.FIRST_TIME, NOISE)).max()


def test_order_of_convergence():
    first = [dpm_error(n, 1) for n in (64, 128, 256)]
    second = [dpm_error(n, 2) for n in (64, 128, 256)]
    assert 1.7 < first[0] / first[1] < 2.3 and 1.7 < first[1] / first[2] < 2.3
    assert second[0] / second[1] > 3.0 and second[1] / second[2] > 3.0


def test_one_step_jumps_to_the_prediction():
    got = dpm_solver.solve(gaussian_x0, NOISE, dpm_solver.make_table(1, 4.0), "x0")
    t = jnp.full((2,), dpm_solver.time_grid(1, 4.0)[0], jnp.float32)
    np.testing.assert_allclose(got, gaussian_x0(NOISE, t), atol=1e-6)


def test_both_predictions_give_one_answer():
    table = dpm_solver.make_table(10, 6.0)
    np.testing.assert_allclose(dpm_solver.solve(gaussian_velocity, NOISE, table),
                               dpm_solver.solve(gaussian_x0, NOISE, table, "x0"), atol=2e-6)


def test_float32_solver_follows_a_float64_replay():
    times = dpm_solver.time_grid(25, 6.0)
    x, previous, h_previous = NOISE.astype(np.float64), None, None
    log_snr = lambda t: np.log(1 - t) - np.log(t) if t else np.inf
    for i, (t, after) in enumerate(zip(times[:-1], times[1:])):
        x0 = np.asarray(gaussian_x0(x, np.full(2, t)))
        h, d = log_snr(after) - log_snr(t), x0
        if 0 < i < 24:
            d = x0 + 0.5 * h / h_previous * (x0 - previous)
        x = after / t * x - (1 - after) * np.expm1(-h) * d
        previous, h_previous = x0, h
    got = dpm_solver.solve(gaussian_velocity, NOISE, dpm_solver.make_table(25, 6.0))
    np.testing.assert_allclose(got, x, atol=1e-6)


def test_states_begin_with_the_noise_and_end_with_the_picture():
    table = dpm_solver.make_table(4)
    states = dpm_solver.solve(gaussian_velocity, NOISE, table, return_states=True)
    np.testing.assert_array_equal(states[0], NOISE)
    np.testing.assert_array_equal(states[-1], dpm_solver.solve(gaussian_velocity, NOISE, table))


def test_fifty_steps_trace_the_network_once():
    calls = []

    def counted(x, t):
        calls.append(t.shape)
        return gaussian_velocity(x, t)

    jax.jit(lambda z: dpm_solver.solve(counted, z, dpm_solver.make_table(50)))(NOISE)
    assert calls == [(2,)]


def test_table_may_be_traced():
    solve = jax.jit(lambda table: dpm_solver.solve(gaussian_velocity, NOISE, table))
    np.testing.assert_allclose(solve(dpm_solver.make_table(5, 3.0)), dpm_solver.solve(
        gaussian_velocity, NOISE, dpm_solver.make_table(5, 3.0)), atol=1e-6)


@pytest.mark.parametrize("arguments", [(0,), (4, -1.0), (4, 1.0, 3)])
def test_impossible_solvers_are_refused(arguments):
    with pytest.raises(UserError):
        dpm_solver.make_table(*arguments)


# guidance


def test_guidance_by_one_and_two_calls_agree_and_scale_one_needs_no_null():
    condition, null = NOISE * 2, np.zeros_like(NOISE[:1])
    network = lambda x, t, c: x * 0.5 + c * t[:, None, None, None]
    x, t = NOISE, np.float32([0.2, 0.7])
    one = guidance.guided_by_one_call(network, condition, null, 3.0)(x, t)
    two = guidance.guided_by_two_calls(lambda x, t: network(x, t, condition),
                                       lambda x, t: network(x, t, null), 3.0)(x, t)
    np.testing.assert_allclose(one, two, atol=1e-6)
    traced = jax.jit(lambda scale: guidance.guided_by_one_call(
        network, condition, null, scale)(x, t))
    np.testing.assert_allclose(traced(3.0), one, atol=1e-6)
    conditional = lambda x, t: network(x, t, condition)
    assert guidance.guided_by_two_calls(conditional, None, 1.0) is conditional


# the student


def replay(network, x, times, prediction, kind, fresh):
    """The reference's loop in float64, clamp included."""
    x = x.astype(np.float64)
    for i, (t, after) in enumerate(zip(times[:-1], times[1:])):
        output = np.asarray(network(x, np.full(2, t)), np.float64)
        x0 = x - t * output if prediction == "velocity" else output
        velocity = output if prediction == "velocity" else (x - x0) / max(t, 0.05)
        if i == len(times) - 2:
            return x0
        step = after - t
        x = x + step * velocity if kind == "ode" else (1 - after) * x0 + after * fresh[i]


@pytest.mark.parametrize("prediction", ["velocity", "x0"])
@pytest.mark.parametrize("kind", ["ode", "sde"])
@pytest.mark.parametrize("times", [(1.0, 0.0), (0.999, 0.5, 0.0), (0.9, 0.3, 0.04, 0.01, 0.0),
                                   (0.02, 0.01, 0.005, 0.0)])
def test_student_agrees_with_a_float64_replay_even_below_the_clamp(prediction, kind, times):
    network = gaussian_velocity if prediction == "velocity" else gaussian_x0
    fresh = np.random.default_rng(1).standard_normal((4, *NOISE.shape)).astype(np.float32)
    table = few_step.make_table(times, prediction, kind)
    got = few_step.sample(network, NOISE, table, lambda i: jnp.asarray(fresh)[i])
    expected = replay(network, NOISE, times, prediction, kind, fresh)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_the_clamp_slows_small_times_down():
    """Below 0.05 the x0 student moves by (t' - t) / 0.05, not by (t' - t) / t, of the way."""
    table = few_step.make_table((0.02, 0.01, 0.0), "x0", "ode")
    np.testing.assert_allclose(table.output[0], 0.01 / 0.05, rtol=1e-6)
    np.testing.assert_allclose(table.state[0], 1 - 0.01 / 0.05, rtol=1e-6)
    np.testing.assert_array_equal((table.state[1], table.output[1]), (0.0, 1.0))


def test_a_single_step_ignores_the_list():
    times = few_step.sampling_times(1, (0.999, 0.5, 0.0), trained_steps=2)
    np.testing.assert_array_equal(times, np.float32([1.0, 0.0]))


def test_sde_without_draws_and_bad_times_are_refused():
    table = few_step.make_table((1.0, 0.5, 0.0), "x0", "sde")
    with pytest.raises(UserError, match="draw"):
        few_step.sample(gaussian_x0, NOISE, table)
    with pytest.raises(UserError, match="fall"):
        few_step.make_table((0.5, 0.9, 0.0), "x0", "ode")
    with pytest.raises(UserError, match="heun"):
        few_step.make_table((1.0, 0.0), "x0", "heun")


def test_gaussian_draws_differ_by_step_and_repeat_by_key():
    draw = few_step.gaussian_draws(jax.random.key(3), NOISE.shape)
    assert not np.allclose(draw(0), draw(1))
    np.testing.assert_array_equal(draw(1), few_step.gaussian_draws(
        jax.random.key(3), NOISE.shape)(jnp.int32(1)))
