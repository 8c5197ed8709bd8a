"""Golden cases of the family pixeldit: sampler trajectories and time grids of both networks."""

import re

import jax
import numpy as np

from pid_jax.diffusion import dpm_solver, guidance, velocity_sampler
from pid_jax.images import to_uint8
from tests.golden.cases import Case, assert_close, handles
from tests.golden.layout import to_nchw, to_nhwc
from tests.golden.pixeldit_networks import compare, load_network

MOST_LEVELS_OFF, SHARE_OFF = 1, 1e-3  # the case's words on uint8


@handles("pixeldit", r"c2i_time_grids.*")
def check_time_grids(case: Case) -> None:
    for name, expected in case.outputs.items():
        steps, shift, last = re.fullmatch(r"steps(\d+)_shift([\d.]+)_last(None|[\d.]+)",
                                          name).groups()
        grid = velocity_sampler.time_grid(int(steps), float(shift),
                                          None if last == "None" else float(last))
        compare(case, grid, expected, name)


@handles("pixeldit", r"c2i_samplers.*")
def check_class_conditional(case: Case) -> None:
    network = load_network(case, "pixeldit_c2i")
    noise, y = to_nhwc(case.inputs["noise"]), case.inputs["y"]
    null = np.full_like(y, network.net.null_label)
    velocity = stepwise(guidance.guided_where_scaled(
        lambda x, t, y: network(network.params, x, t, y).x, y, null))
    for run in case.meta["variants"]:
        name, expected = run["name"], case.under(f"out/{run['name']}/")
        table = velocity_sampler.make_table(run["steps"], run["guidance"], run["shift"],
                                            run.get("last_step"), tuple(run["interval"]))
        states, velocities = _trajectory(velocity, noise, table, case, run)
        _compare_levels(to_nchw(to_uint8(states[-1])), expected.pop("uint8"), name)
        found = {"timesteps": table.times, "x": to_nchw(states), "v": to_nchw(velocities)}
        for key, value in expected.items():  # the committed subset leaves out long trajectories
            compare(case, found[key], value, f"{name}/{key}")


def _trajectory(velocity, noise, table, case: Case, run: dict):
    draws = case.inputs.get(f"{run['name']}/sde_noise")
    padded = None if draws is None else to_nhwc(np.concatenate([draws, draws[-1:]]))
    step_noise = None if draws is None else (lambda step: jax.numpy.asarray(padded)[step])
    sampler = "heun_exact" if run["kind"] == "heun" and run.get("exact") else run["kind"]
    with jax.disable_jit():
        return velocity_sampler.sample(velocity, noise, table, sampler, run.get("step_fn", "ode"),
                                       step_noise, return_states=True)


def stepwise(velocity):
    """The network compiled once for all runs, to be used where the solver's loop is not compiled.

    That the compiled loop does the same is tested in tests/diffusion/test_velocity_sampler.py.
    """
    compiled = jax.jit(velocity)

    def call(*arguments):
        with jax.disable_jit(False):
            return compiled(*arguments)

    return call


def _compare_levels(actual: np.ndarray, expected: np.ndarray, name: str) -> None:
    off = np.abs(actual.astype(int) - expected)
    assert off.max() <= MOST_LEVELS_OFF and np.mean(off > 0) < SHARE_OFF, f"{name}/uint8"


@handles("pixeldit", r"t2i_dpm.*")
def check_text_to_image(case: Case) -> None:
    network, inputs = load_network(case, "pixeldit_t2i"), case.inputs
    predict = lambda x, t, text: network(network.params, x, 1000 * t, text).x
    velocity = stepwise(guidance.guided_where_scaled(predict, inputs["cond"], inputs["uncond"]))
    for run in case.meta["variants"]:
        name, expected = run["name"], case.under(f"out/{run['name']}/")
        table = dpm_solver.make_table(run["steps"], run["shift"], min(run["steps"], 2))
        assert_close(table.times, expected["sigmas"], 1e-6, name=f"{name}/sigmas")
        guided = _within(velocity, run["cfg"], tuple(run["interval"]))
        with jax.disable_jit():
            states = dpm_solver.solve(guided, to_nhwc(inputs["noise"]), table, return_states=True)
        compare(case, to_nchw(states[1:]), expected["x"], f"{name}/x")


def _within(velocity, scale: float, interval: tuple[float, float]):
    return lambda x, t: velocity(x, t[0], guidance.scale_within(t[0], scale, interval))
