"""Group F: EMA and learning-rate series, gradient clipping, whole training steps."""

import jax
import numpy as np

from pid_jax.diffusion import schedules
from pid_jax.training import ema, optim
from tests.golden.cases import Case, assert_close, handles

DECAYS = {"LambdaLinearScheduler": "linear", "LambdaWarmUpCosineScheduler": "cosine"}


@handles("pid", r"F01.*")
def check_ema(case: Case) -> None:
    tolerance = case.tolerance
    for row in case.meta["table"]:
        exponent = schedules.ema_exponent(row["rate"])
        assert_close(exponent, row["exponent"], tolerance["atol"], tolerance["rtol"], "exponent")
        series = [(entry["iteration"], 0, entry["beta"]) for entry in row["rows"]]
        series += [(entry["iteration"], row["iteration_shift"], entry["beta"])
                   for entry in row["rows_shift"]]
        phases = next(key for key in row if key.startswith("student_freq"))
        frequency = int(phases.removeprefix("student_freq"))
        for entry in row[phases]:
            student, effective = schedules.student_phase(entry["iteration"], frequency)
            assert (student, effective) == (entry["is_student"], entry["effective_iteration"])
            series += [(effective, 0, entry["beta"])] if student else []
        for iteration, shift, beta in series:
            got = 1.0 - schedules.ema_new_weight(iteration, exponent, shift)
            assert_close(got, beta, tolerance["atol"], tolerance["rtol"],
                         f"beta of rate {row['rate']}, iteration {iteration}, shift {shift}")
    for name, expected in case.outputs.items():
        spec = ema.EmaSpec(kind="constant", decay=float(name.removeprefix("ema_after_beta_")))
        got = jax.jit(ema.update_ema, static_argnums=3)(
            {"ema": {"w": case.inputs["ema"]}}, {"w": case.inputs["param"]}, 5, (spec,))
        assert_close(got["ema"]["w"], expected, case.meta["tolerance_tensor"]["atol"], name=name)


@handles("pid", r"F02.*")
def check_learning_rate(case: Case) -> None:
    for row in case.meta["table"]:
        config = {key: tuple(values) for key, values in row["config"].items()}
        schedule = schedules.CycleSchedule(**config, decay=DECAYS[row["kind"]])
        for entry in row["rows"]:
            assert_close(schedule(entry["step"]), entry["multiplier"], case.tolerance["atol"],
                         case.tolerance["rtol"], f"{row['name']} at {entry['step']}")


@handles("pid", r"F05.*")
def check_grad_clip(case: Case) -> None:
    for run in case.meta["cases"]:
        clip = optim.GradClip(run["clip_norm"], **_clip_options(run["options"]))
        grads = case.under(f"in/{run['name']}/")
        clipped, norm, skipped = jax.jit(clip)(grads)
        assert bool(skipped) == run["step_skipped"], run["name"]
        np.testing.assert_allclose(norm, float(run["returned_norm"]), rtol=case.tolerance["rtol"])
        for name, expected in case.under(f"out/{run['name']}/").items():
            assert_close(clipped[name], expected, case.tolerance["atol"], case.tolerance["rtol"],
                         f"{run['name']}/{name}")


def _clip_options(options: dict) -> dict:
    names = {"skip_grad_norm_threshold": "spike_threshold"}
    return {names.get(key, key): value for key, value in options.items() if value is not None}
