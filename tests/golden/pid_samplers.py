"""Cases C02-C04 and D06: samplers and R1 around whole networks."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.diffusion import dpm_solver, few_step, flow, guidance, losses
from tests.golden.cases import Case, assert_close, handles
from tests.golden.layout import to_nchw, to_nhwc
from tests.golden.networks import load_network
from tests.golden.pid_flow import check_dpm_run


def _predict(network, x, t, text, **conditions):
    return network(network.params, x, flow.network_time(t), text, **conditions).x


@handles("pid", r"C02.*")
def check_dpm_pidnet(case: Case) -> None:
    """Guidance by two calls; the latent and its sigma stand on both sides."""
    network, inputs = load_network(case), case.inputs
    text = inputs["text_cond"]
    null = jnp.broadcast_to(inputs["text_null"], text.shape)
    predict = functools.partial(_predict, network, lq_latent=to_nhwc(inputs["lq_latent"]),
                                degrade_sigma=inputs["degrade_sigma"])

    def states(table, prediction, scale):
        guided = guidance.guided_by_two_calls(lambda x, t: predict(x, t, text),
                                              lambda x, t: predict(x, t, null), scale)
        return dpm_solver.solve(guided, to_nhwc(inputs["z"]), table, prediction,
                                return_states=True)

    _check_dpm_runs(case, states)


@handles("pid", r"C03.*")
def check_dpm_t2i(case: Case) -> None:
    """Guidance by one call on the doubled batch."""
    network, inputs = load_network(case), case.inputs

    def states(table, prediction, scale):
        guided = guidance.guided_by_one_call(functools.partial(_predict, network),
                                             inputs["text_cond"], inputs["text_null"], scale)
        return dpm_solver.solve(guided, to_nhwc(inputs["z"]), table, prediction,
                                return_states=True)

    _check_dpm_runs(case, states)


def _check_dpm_runs(case: Case, states: Callable) -> None:
    """Every run, with tables of one length so that the network compiles once for each kind."""
    unguided = jax.jit(lambda table, prediction: states(table, prediction, 1.0), static_argnums=1)
    guided = jax.jit(states, static_argnums=1)
    longest = max(run["steps"] for run in case.meta["runs"])
    for run in case.meta["runs"]:
        table, scale = dpm_solver.make_table(run["steps"], run["shift"]), run["cfg_scale"]
        arguments = _padded(table, longest), run.get("prediction_type", "velocity")
        got = unguided(*arguments) if scale == 1.0 else guided(*arguments, jnp.float32(scale))
        check_dpm_run(case, run, table, to_nchw(got)[:run["steps"] + 1],
                      f"{run['key']}/timesteps")


def _padded(table: dpm_solver.DpmTable, steps: int) -> dpm_solver.DpmTable:
    """The table with steps appended that keep the state as it is."""
    more = steps - len(table.keep)
    values = dpm_solver.DpmTable(times=0.0, keep=1.0, take=0.0, correction=0.0)
    return jax.tree.map(lambda row, value: np.pad(row, (0, more), constant_values=value),
                        table, values)


@handles("pid", r"C04.*")
def check_student_sampler(case: Case) -> None:
    network, inputs = load_network(case), case.inputs
    predict = functools.partial(_predict, network, text=inputs["text_cond"],
                                lq_latent=to_nhwc(inputs["lq_latent"]),
                                degrade_sigma=inputs["degrade_sigma"])

    @jax.jit
    def sample(table, fresh):
        return few_step.sample(predict, to_nhwc(inputs["z"]), table, lambda step: fresh[step])

    longest = max(run["num_steps"] for run in case.meta["runs"])
    for run in case.meta["runs"]:
        table = few_step.make_table(run["t_list"], run["prediction_type"], run["sample_type"])
        fresh = [to_nhwc(inputs[f"{run['key']}/eps{i}"]) for i in range(run["n_eps"])]
        fresh += [np.zeros_like(to_nhwc(inputs["z"]))] * (longest - run["n_eps"])
        got = sample(_padded_student(table, longest), np.stack(fresh))
        assert_close(to_nchw(got), case.outputs[f"{run['key']}/x0"],
                     case.tolerance["atol"], case.tolerance["rtol"], run["key"])


def _padded_student(table: few_step.StepTable, steps: int) -> few_step.StepTable:
    """The table with steps appended that keep the state as it is."""
    more = steps - len(table.times)
    return few_step.StepTable(*(
        row if row is None else np.pad(row, (0, more), constant_values=float(name == "state"))
        for name, row in table._asdict().items()))


@handles("pid", r"D06.*")
def check_r1(case: Case) -> None:
    """R1 on features of the frozen teacher: alpha n is added to the noised picture."""
    network = load_network(case)
    disc = load_network(case, "discriminator", "disc_config", "disc_params")
    inputs = case.inputs
    close = functools.partial(assert_close, atol=case.tolerance["atol"],
                              rtol=case.tolerance["rtol"])

    @jax.jit
    def features(x_t):
        return network(network.params, x_t, flow.network_time(inputs["t"]), inputs["caption_embs"],
                       lq_latent=to_nhwc(inputs["lq_latent"]),
                       degrade_sigma=inputs["degrade_sigma"],
                       feature_indices=tuple(case.meta["disc_config"]["feature_indices"]),
                       return_features_early=True).features

    noised = flow.interpolate(to_nhwc(inputs["x0"]), to_nhwc(inputs["eps"]), inputs["t"])
    perturbed = noised + ALPHA * to_nhwc(inputs["alpha_noise"])
    real, near = features(noised), features(perturbed)

    def r1(params):
        logits = disc(params, real)
        return losses.r1_penalty(logits, disc(params, near)), logits

    (value, logits), gradient = jax.jit(jax.value_and_grad(r1, has_aux=True))(disc.params)
    close(to_nchw(noised), case.outputs["perturbed_real"], name="noised picture")
    close(logits, case.outputs["real_logits"], name="real logits")
    close(value, case.outputs["r1"], name="r1")
    for index, feature in enumerate(real):
        close(to_nchw(feature), case.outputs[f"feature_{index}"], name=f"feature {index}")
    gradients = disc.to_torch(gradient)
    for name, expected in case.under("grad/").items():
        close(gradients[name], expected, name=f"gradient of {name}")


ALPHA = 0.1
"""The reference's scale of the perturbation."""
