import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.diffusion import schedules
from pid_jax.errors import UserError


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.1, 0.2, 0.28])
def test_ema_exponent_gives_the_relative_width(rate):
    """The width of the weighting t^exponent on [0, 1] is sqrt(e+1) / ((e+2) sqrt(e+3))."""
    e = schedules.ema_exponent(rate)
    np.testing.assert_allclose(np.sqrt(e + 1) / ((e + 2) * np.sqrt(e + 3)), rate, rtol=1e-9)


def test_ema_rates_without_an_exponent_are_refused():
    for rate in (0.0, 0.5):
        with pytest.raises(UserError, match="EMA rate"):
            schedules.ema_exponent(rate)


def test_traced_ema_weight_keeps_its_digits():
    exponent = schedules.ema_exponent(0.1)
    traced = jax.jit(lambda i: schedules.ema_new_weight(i, exponent))
    for iteration in (0, 1, 2, 100, 10_000, 1_000_000):
        np.testing.assert_allclose(traced(jnp.int32(iteration)),
                                   schedules.ema_new_weight(iteration, exponent), rtol=2e-6)


def test_ema_weight_copies_up_to_the_shift():
    assert schedules.ema_new_weight(5, 6.9, iteration_shift=-5) == 1.0
    assert 0 < schedules.ema_new_weight(6, 6.9, iteration_shift=-5) < 1


def test_traced_learning_rate_equals_the_host_and_holds_after_the_last_cycle():
    for decay in schedules.DECAYS:
        schedule = schedules.CycleSchedule((10, 5), (50, 30), (0.1, 0.2), (1.0, 0.5),
                                           (0.0, 0.05), decay)
        steps = np.arange(100)
        host = np.array([schedule(step) for step in steps])
        np.testing.assert_allclose(jax.jit(schedule)(jnp.asarray(steps)), host, atol=2e-6)
        np.testing.assert_allclose(host[80:], 0.05, atol=1e-12)


def test_schedule_without_warm_up_starts_at_the_top():
    assert schedules.CycleSchedule(warm_up_steps=(0,))(0) == 1.0


def test_bad_schedules_are_refused():
    with pytest.raises(UserError, match="same number"):
        schedules.CycleSchedule(warm_up_steps=(1, 2))
    with pytest.raises(UserError, match="step-down"):
        schedules.CycleSchedule(decay="step-down")
    with pytest.raises(UserError, match="shorter"):
        schedules.CycleSchedule(warm_up_steps=(50,), cycle_lengths=(50,))


def test_phases_and_ramp():
    assert [schedules.student_phase(i, 6) for i in (0, 1, 12)] == [(True, 0), (False, 0), (True, 2)]
    assert [float(schedules.linear_ramp(i, 100)) for i in (0, 50, 300)] == [0.0, 0.5, 1.0]
    assert schedules.linear_ramp(0, 0) == 1.0
