"""Cases F03 and F04: three whole training updates of the text-to-image net and the PiD teacher."""

import re
from collections.abc import Callable, Iterator

import jax
import numpy as np

from pid_jax.diffusion import flow, losses, time_sampling
from pid_jax.diffusion.degrade import normalize_image
from pid_jax.training import ema, freezing, optim
from tests.golden.cases import Case, assert_close, handles
from tests.golden.layout import to_nhwc
from tests.golden.networks import GoldenNet, load_network


@handles("pid", r"F03.*")
def check_t2i_updates(case: Case) -> None:
    network = load_network(case)
    x0 = np.asarray(normalize_image(to_nhwc(case.inputs["image_uint8"]), "uint8"))

    def loss_fn(params, draws):
        noise, t = to_nhwc(draws["noise"]), draws["t"]
        x_t = flow.interpolate(x0, noise, t)
        out = network(params, x_t, flow.network_time(t), case.inputs["caption_embs"])
        loss = flow.flow_loss(out.x, x_t, x0, noise, t)
        return loss, {"loss": loss}

    def check_draws(step, draws):
        expected = time_sampling.shift_time(
            time_sampling.logit_normal(draws["t_normal"]), step["shift"])
        assert_close(expected, draws["t"], 1e-7, 1e-6, "training times")

    mask = freezing.trainable_mask(network.params, (freezing.LAST_BLOCK_TEXT,))
    frozen = {name for name, trains in network.mask_to_torch(mask).items() if not trains}
    assert frozen == set(case.meta["frozen"])
    _check_updates(case, network, mask, loss_fn, check_draws)


@handles("pid", r"F04.*")
def check_teacher_updates(case: Case) -> None:
    network, inputs = load_network(case), case.inputs
    x0, lq_image = to_nhwc(inputs["x0"]), to_nhwc(inputs["lq_image"])
    prediction, align = case.meta["prediction_type"], losses.AlignLoss(**case.meta["align"])

    def loss_fn(params, draws):
        noise, t, sigma = to_nhwc(draws["noise"]), draws["t"], draws["degrade_sigma"]
        latent = to_nhwc(draws["lq_latent_cond"])
        x_t = flow.interpolate(x0, noise, t)
        out = network(params, x_t, flow.network_time(t), inputs["caption_embs"],
                      lq_latent=latent, degrade_sigma=sigma, return_lq_aux=True)
        diffusion = flow.flow_loss(out.x, x_t, x0, noise, t, prediction)
        aligned = align(out.lq_rgb, lq_image, sigma, losses.latent_is_kept(latent))
        total = diffusion + case.meta["align_weight"] * aligned
        return total, {"total": total, "diffusion_loss": diffusion,
                       "lq_latent_image_align_loss": aligned}

    mask = freezing.trainable_mask(network.params, (freezing.ALL_BUT_LQ,))
    trainable = {name for name, trains in network.mask_to_torch(mask).items() if trains}
    assert trainable == set(case.meta["trainable"])
    _check_updates(case, network, mask, loss_fn, lambda step, draws: None)


def _check_updates(case: Case, network: GoldenNet, mask: dict, loss_fn: Callable,
                   check_draws: Callable) -> None:
    """Runs every update; compares losses, norms, clipped gradients, parameters and the EMA."""
    optimizer, specs = _optimizer(case), (ema.EmaSpec("ema", rate=0.1),)
    trainable, frozen = freezing.partition(network.params, mask)
    layers, _ = freezing.partition(mask, mask)
    state, average = optimizer.init(trainable), ema.init_ema(trainable, specs)
    whole = lambda tree: network.to_torch(freezing.combine(tree, frozen))

    @jax.jit
    def update(trainable, state, average, draws, iteration):
        grads, values = jax.grad(lambda part: loss_fn(freezing.combine(part, frozen), draws),
                                 has_aux=True)(trainable)
        clipped, _, _ = optimizer.clip(freezing.apply_mask(grads, layers))
        trainable, state, metrics = optimizer.update(grads, state, trainable, layers)
        average = ema.update_ema(average, trainable, iteration, specs)
        return trainable, state, average, clipped, values | metrics

    for step in case.meta["steps"]:
        draws = case.under(f"in/step{step['step']}/")
        check_draws(step, draws)
        if "ema_beta" in step:
            beta = 1.0 - specs[0].new_weight(step["step"])
            assert_close(beta, step["ema_beta"], 1e-9, 1e-7, "ema_beta")
        trainable, state, average, clipped, values = update(
            trainable, state, average, draws, step["step"])
        _check_scalars(case, step, values)
        if step["step"] == 0:
            _check_gradients(case, whole(clipped))
        _check_parameters(case, f"param_after{step['step'] + 1}", whole(trainable))
        _check_parameters(case, f"ema_after{step['step'] + 1}", whole(average["ema"]))


def _optimizer(case: Case) -> optim.AdamW:
    options = case.meta["optimizer"]
    assert (options["name"], options["lr_multiplier"]) == ("AdamW", 1.0)
    return optim.AdamW(options["lr"], beta1=options["betas"][0], beta2=options["betas"][1],
                       eps=options["eps"], weight_decay=options["weight_decay"],
                       clip=optim.GradClip(case.meta["clip_norm"]))


def _check_scalars(case: Case, step: dict, values: dict) -> None:
    rtol = case.tolerance["loss"]["rtol"]
    values = values | {"returned_norm": values["grad_norm"],
                       "grad_norm_before_clip": values["grad_norm"]}
    for name in values.keys() & step.keys():
        assert_close(values[name], step[name], 0.0, rtol, f"{name} of step {step['step']}")


def _check_gradients(case: Case, clipped: dict[str, np.ndarray]) -> None:
    words = re.fullmatch(r"([\d.e-]+)\*max\|grad tensor\|\+([\d.e-]+)",
                         case.tolerance["grad"]["atol"])
    relative, absolute = map(float, words.groups())
    for name, rows, expected in _tensors(case, "grad_clipped"):
        atol = relative * np.abs(expected).max() + absolute
        assert_close(_every(rows, clipped[name]), expected, atol, case.tolerance["grad"]["rtol"],
                     f"clipped gradient of {name}")


def _check_parameters(case: Case, prefix: str, params: dict[str, np.ndarray]) -> None:
    small, other = _parameter_tolerances(case)
    gradients = {name: value for name, _, value in _tensors(case, "grad_clipped")}
    for name, rows, expected in _tensors(case, prefix):
        gradient = gradients.get(name, np.ones_like(expected))
        atol = np.where(np.abs(gradient) < 1e-6, small, other)
        assert_close(_every(rows, params[name]), expected, atol, name=f"{prefix} {name}")


def _parameter_tolerances(case: Case) -> tuple[float, float]:
    """Absolute tolerances (where the first clipped gradient is below 1e-6, elsewhere)."""
    words, lr = case.tolerance["param"]["atol"], case.meta["optimizer"]["lr"]
    if match := re.fullmatch(r"([\d.e-]+) \+ 2\*lr for entries with \|clipped grad\| < 1e-6 .*; "
                             r"else ([\d.e-]+)", words):
        return float(match[1]) + 2 * lr, float(match[2])
    match = re.fullmatch(r"([\d.e-]+); 2\*lr where \|clipped grad\|<1e-6", words)
    return 2 * lr, float(match[1])


def _every(rows: int, value: np.ndarray) -> np.ndarray:
    """Every `rows`-th row; scalars as they are."""
    return value if rows == 1 else value[::rows]


def _tensors(case: Case, prefix: str) -> Iterator[tuple[str, int, np.ndarray]]:
    """(torch name, stored every how many rows, values) of the tensors under `prefix`."""
    for full, value in case.tensors.items():
        if match := re.fullmatch(rf"{prefix}(?:@rows(\d+))?/(.*)", full):
            yield match[2], int(match[1] or 1), value
