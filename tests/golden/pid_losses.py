"""Group D: losses (D03, the discriminator network, is with the networks)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.diffusion import losses
from tests.golden.cases import Case, assert_close, handles, parameter_pool
from tests.golden.layout import to_nchw, to_nhwc


def _close(case: Case):
    return functools.partial(assert_close, atol=case.tolerance["atol"],
                             rtol=case.tolerance["rtol"])


@handles("pid", r"D01.*")
def check_vsd(case: Case) -> None:
    """Whole loss and gradient, and (from the gradient) each sample's share of the loss."""
    close = _close(case)
    for run in sorted({name.split("/")[1] for name in case.tensors}):
        gen, teacher, fake = (to_nhwc(case.tensors[f"in/{run}/{k}"])
                              for k in ("gen", "teacher_x0", "fake_x0"))
        out = case.under(f"out/{run}/")
        loss, gradient = jax.jit(jax.value_and_grad(losses.vsd_loss))(gen, teacher, fake)
        close(loss, out["loss"], name=f"{run}/loss")
        close(to_nchw(gradient), out["grad_gen"], name=f"{run}/grad_gen")
        direction = to_nchw(losses.vsd_direction(gen, teacher, fake)).astype(np.float64)
        expected = out["grad_gen"].astype(np.float64) * gen.size
        close(_per_sample_loss(direction), _per_sample_loss(expected), name=f"{run}/per sample")


def _per_sample_loss(direction: np.ndarray) -> np.ndarray:
    return 0.5 * np.mean(direction**2, axis=(1, 2, 3))


@handles("pid", r"D02.*")
def check_dsm_gan(case: Case) -> None:
    close = _close(case)
    pred, target = case.inputs["dsm/pred"], case.inputs["dsm/target"]
    real, fake = case.inputs["gan/real_logits"], case.inputs["gan/fake_logits"]
    dsm, dsm_grad = jax.value_and_grad(losses.mean_squared_error)(pred, target)
    gen, gen_grad = jax.value_and_grad(losses.gan_generator_loss)(fake)
    disc, (real_grad, fake_grad) = jax.value_and_grad(
        losses.gan_discriminator_loss, (0, 1))(real, fake)
    actual = {"dsm/loss": dsm, "dsm/grad_pred": dsm_grad, "gan/gen_loss": gen,
              "gan/gen_grad_fake": gen_grad, "gan/disc_loss": disc,
              "gan/disc_grad_real": real_grad, "gan/disc_grad_fake": fake_grad}
    for name, expected in case.outputs.items():
        close(actual[name], expected, name=name)


@handles("pid", r"D04.*")
def check_lq_align(case: Case) -> None:
    close = _close(case)
    for run in case.meta["cases"]:
        prediction, target = (to_nhwc(case.tensors[k]) for k in ("in/pred", run["target"]))
        sigma = case.inputs["degrade_sigma"] if run["uses_sigma"] else None
        loss_fn = functools.partial(losses.AlignLoss(**run["config"]), target=target, sigma=sigma,
                                    keep=_keep(case, run))
        loss, gradient = jax.jit(jax.value_and_grad(loss_fn))(prediction)
        close(loss, case.outputs[f"{run['name']}/loss"], name=f"{run['name']}/loss")
        close(to_nchw(gradient), case.outputs[f"{run['name']}/grad_pred"],
              name=f"{run['name']}/grad_pred")


def _keep(case: Case, run: dict) -> np.ndarray | None:
    if run["keep"] == "all False":
        return np.zeros(len(case.inputs["pred"]), bool)
    return None if run["keep"] is None else case.tensors[run["keep"]]


@handles("pid", r"D05.*")
def check_repa(case: Case) -> None:
    close = _close(case)
    for index, run in enumerate(case.meta["cases"]):
        params = _run_params(case, index)

        def loss_fn(hidden, features):
            return losses.repa_loss(_project(params, hidden), features)

        run_inputs = case.under(f"in/{run['name']}/")
        loss, gradient = jax.jit(jax.value_and_grad(loss_fn))(
            run_inputs["hidden"], run_inputs["dino_features"])
        close(loss, case.outputs[f"{run['name']}/loss"], name=f"{run['name']}/loss")
        close(gradient, case.outputs[f"{run['name']}/grad_hidden"], name=f"{run['name']}/grad")


def _run_params(case: Case, index: int) -> dict[str, np.ndarray]:
    pool = parameter_pool(case.folder)
    return {key: pool[entry] for key, entry in case.meta["cases"][index]["params"].items()}


def _project(params: dict[str, np.ndarray], tokens: jax.Array) -> jax.Array:
    """The projection head: Linear layers (torch [out, in]) with SiLU between."""
    layers = sorted({int(key.split(".")[0]) for key in params})
    for layer in layers:
        tokens = tokens @ params[f"{layer}.weight"].T + params[f"{layer}.bias"]
        tokens = jax.nn.silu(tokens) if layer != layers[-1] else tokens
    return jnp.asarray(tokens)
