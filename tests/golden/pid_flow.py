"""Groups B and C: the flow path, time shifts and the samplers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.diffusion import dpm_solver, few_step, flow, guidance, time_sampling
from tests.golden.cases import Case, assert_close, handles
from tests.golden.layout import to_nchw, to_nhwc

PREDICTIONS = {"flow": "velocity", "x_start": "x0"}


@handles("pid", r"B01.*")
def check_flow_loss(case: Case) -> None:
    """The reference trainer's velocity is x0 - noise: the network's output, negated."""
    tolerance = case.tolerance
    for run, expected_loss in case.meta["losses"].items():
        prediction, sigma_min = run.split("_sigmamin")
        out = case.under(f"out/{run}/")
        x0, noise, net = (case.inputs[k] for k in ("x0", "noise", "net_output"))
        sign = -1.0 if prediction == "velocity" else 1.0
        t, sigma_min = case.inputs["t"], float(sigma_min)
        x_t = flow.interpolate(x0, noise, t, sigma_min)
        loss, gradient = jax.jit(jax.value_and_grad(
            lambda net: flow.flow_loss(sign * net, x_t, x0, noise, t, prediction, sigma_min)))(net)
        actual = {
            "loss": loss,
            "x_t": x_t,
            "v_pred": -flow.predicted_velocity(sign * net, x_t, t, prediction),
            "x0_pred": flow.predicted_x0(sign * net, x_t, t, prediction),
            "net_t": flow.network_time(t),
            "grad_net_output": gradient,
            "get_prediction": net,
            "step_to_0.25": flow.euler_step(x0, -net, t, 0.25),
        }
        for name, expected in out.items():
            assert_close(actual[name], expected, tolerance["atol"], tolerance["rtol"],
                         f"{run}/{name}")
        assert_close(loss, expected_loss, tolerance["atol"], tolerance["rtol"], run)


@handles("pid", r"B02.*")
def check_time_shift(case: Case) -> None:
    close = functools.partial(assert_close, atol=case.tolerance["atol"],
                              rtol=case.tolerance["rtol"])
    shift_time = jax.jit(time_sampling.shift_time)
    t = np.asarray(case.meta["t"], np.float32)
    for shift, expected in case.meta["static"].items():
        close(shift_time(t, float(shift)), expected, name=f"static {shift}")
    for row in case.meta["dynamic"]:
        shift = time_sampling.dynamic_shift(row["H"], row["W"], row["base_shift"],
                                            row["base_image_size_for_shift_calc"])
        close(shift, row["shift"], name=f"shift of {row}")
        close(shift_time(t, shift), row["t_shifted"], name=f"times of {row}")
    z = np.asarray(case.meta["logit_normal"]["z"], np.float32)
    for name, expected in case.meta["logit_normal"]["out"].items():
        mean, std = (float(part) for part in name.removeprefix("mean").split("_std"))
        close(time_sampling.logit_normal(z, mean, std), expected, name=name)
    u = np.asarray(case.meta["power"]["u"], np.float32)
    for exponent, expected in case.meta["power"]["out"].items():
        close(time_sampling.power(u, float(exponent)), expected, name=f"power {exponent}")


@handles("pid", r"C01.*")
def check_dpm_analytic(case: Case) -> None:
    """The model is f(x, t, y) = A x + b t + c y over flattened channel-first pictures."""
    inputs = case.inputs
    z, cond, null = (to_nhwc(inputs[k]) for k in ("z", "cond", "uncond"))

    def model(x, t, y):
        flat = _channel_first(x) @ inputs["A"].T + t[:, None] * inputs["b"]
        flat = flat + _channel_first(y) @ inputs["c"].T
        channels_first = (x.shape[0], x.shape[3], *x.shape[1:3])
        return jnp.moveaxis(flat.reshape(channels_first), 1, -1)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def states(table, prediction, scale):
        predict = guidance.guided_by_one_call(model, cond, null, scale)
        return dpm_solver.solve(predict, z, table, prediction, return_states=True)

    for run in case.meta["runs"]:
        table = dpm_solver.make_table(run["steps"], run["flow_shift"], run["order"])
        got = states(table, PREDICTIONS[run["model_type"]], run["cfg_scale"])
        check_dpm_run(case, run, table, to_nchw(got), f"timesteps_n{run['steps']}_s"
                      f"{run['flow_shift']:g}")


def check_dpm_run(case: Case, run: dict, table: dpm_solver.DpmTable, states: np.ndarray,
                  timesteps: str) -> None:
    """Compares time steps, saved states and final pictures with the run's own tolerance."""
    atol, rtol = tolerance_of_run(case.tolerance["atol"], run), case.tolerance["rtol"]
    out = case.under(f"out/{run['key']}/")
    actual = {"states": states, "final": states[-1], "final_unclamped": states[-1]}
    if case.meta.get("net"):
        actual["final"] = np.clip(states[-1], -1, 1)
    assert_close(table.times, case.outputs[timesteps], 1e-7, 1e-6, timesteps)
    for name in out.keys() - {"timesteps"}:
        assert_close(actual[name], out[name], atol, rtol, f"{run['key']}/{name}")


def tolerance_of_run(words: str, run: dict) -> float:
    """Sums terms like `2e-4` and `2*max_diff of the run`, the names being keys of `run`."""
    total = 0.0
    for term in words.split(" + "):
        factor, _, name = term.partition("*")
        total += float(factor) * (run[name.split()[0]] if name else 1.0)
    return total


def _channel_first(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, -1, 1).reshape(x.shape[0], -1)


@handles("pid", r"C05.*")
def check_student_times(case: Case) -> None:
    for row in case.meta["table"]:
        steps = row["num_steps"] or row["student_sample_steps"]
        times = few_step.student_times(steps, row["student_t_list"] or (),
                                       row["student_sample_steps"])
        assert_close(times, row["result"], case.tolerance["atol"], case.tolerance["rtol"], str(row))
