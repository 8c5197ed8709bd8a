"""Cases F03 and F04: three whole training updates, by the objectives' own loss and update."""

import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.config import base_config
from pid_jax.diffusion import time_sampling
from pid_jax.diffusion.degrade import normalize_image
from pid_jax.objectives.base import Objective
from pid_jax.objectives.pid_teacher import PidTeacher
from pid_jax.objectives.pixeldit_t2i import PixelDitT2I
from pid_jax.training import freezing
from tests.golden.cases import Case, assert_close, handles
from tests.golden.layout import to_nhwc
from tests.golden.networks import GoldenNet, load_network

METRIC_OF = {"loss": "loss", "total": "loss", "diffusion_loss": "flow_loss",
             "lq_latent_image_align_loss": "align_loss", "returned_norm": "grad_norm",
             "grad_norm_before_clip": "grad_norm"}


@handles("pid", r"F03.*")
def check_t2i_updates(case: Case) -> None:
    network = load_network(case)
    objective = PixelDitT2I(_config(case), network.net, text=None)
    image = np.asarray(normalize_image(to_nhwc(case.inputs["image_uint8"]), "uint8"))

    def examples(draws):
        times = time_sampling.logit_normal(draws["t_normal"])
        shifted = time_sampling.shift_time(times, objective.shift(*image.shape[1:3]))
        assert_close(shifted, draws["t"], 1e-7, 1e-6, "training times")
        return {"image": image, "text": case.inputs["caption_embs"],
                "noise": to_nhwc(draws["noise"]), "t": draws["t"]}

    frozen = {name for name, trains in network.mask_to_torch(objective.mask).items() if not trains}
    assert frozen == set(case.meta["frozen"])
    _check_updates(case, network, objective, examples)


@handles("pid", r"F04.*")
def check_teacher_updates(case: Case) -> None:
    network, inputs = load_network(case), case.inputs
    objective = PidTeacher(_config(case), network.net, text=None, codec=None)

    def examples(draws):
        latent, sigma = to_nhwc(draws["lq_latent_cond"]), draws["degrade_sigma"]
        return {"image": to_nhwc(inputs["x0"]), "text": inputs["caption_embs"], "t": draws["t"],
                "noise": to_nhwc(draws["noise"]), "latent": latent, "sigma": sigma,
                **objective.alignment_target(to_nhwc(inputs["lq_image"]), latent, sigma)}

    trainable = {name for name, trains in network.mask_to_torch(objective.mask).items() if trains}
    assert trainable == set(case.meta["trainable"])
    _check_updates(case, network, objective, examples)


def _config(case: Case):
    """The case's values in a run's config."""
    meta, config = case.meta, base_config()
    options, shift = meta["optimizer"], meta["dynamic_shift"]
    assert (options["name"], options["lr_multiplier"]) == ("AdamW", 1.0)
    config.optim.update({"lr": options["lr"], "betas": tuple(options["betas"]),
                         "eps": options["eps"], "weight_decay": options["weight_decay"],
                         "clip_norm": meta["clip_norm"]})
    config.flow.update({"dynamic_shift": True, "dynamic_base_shift": shift["base_shift"],
                        "dynamic_image_size": shift["base_image_size_for_shift_calc"],
                        "prediction_type": meta.get("prediction_type", "velocity")})
    if "align" in meta:
        config.align.update({"enabled": True, "weight": meta["align_weight"], **meta["align"]})
    return config


def _check_updates(case: Case, network: GoldenNet, objective: Objective, examples) -> None:
    """Runs every update; compares losses, norms, clipped gradients, parameters and the EMA."""
    layers, _ = freezing.partition(objective.mask, objective.mask)
    state = objective.start(jax.tree.map(jnp.asarray, network.params))
    _, frozen = freezing.partition(state.params, objective.mask)

    @jax.jit
    def update(state, examples):
        values, grads = objective.gradients(state.params, examples)
        clipped, _, _ = objective.optimizer.clip(freezing.apply_mask(grads, layers))
        state, metrics = objective.update(state, grads)
        return state, clipped, values | metrics

    height, width = examples(case.under("in/step0/"))["image"].shape[1:3]
    for step in case.meta["steps"]:
        assert_close(objective.shift(height, width), step["shift"], 0, 1e-12, "shift")
        _check_ema_beta(step, objective)
        state, clipped, values = update(state, examples(case.under(f"in/step{step['step']}/")))
        _check_scalars(case, step, values)
        if step["step"] == 0:
            whole = freezing.combine(clipped, frozen)
            _check_gradients(case, network.to_torch(whole))
        done = step["step"] + 1
        _check_parameters(case, f"param_after{done}", network.to_torch(state.params))
        _check_parameters(case, f"ema_after{done}", network.to_torch(state.ema["ema"]))


def _check_ema_beta(step: dict, objective: Objective) -> None:
    if "ema_beta" in step:
        beta = 1.0 - objective.averages[0].new_weight(step["step"])
        assert_close(beta, step["ema_beta"], 1e-9, 1e-7, "ema_beta")


def _check_scalars(case: Case, step: dict, values: dict) -> None:
    rtol = case.tolerance["loss"]["rtol"]
    for name in METRIC_OF.keys() & step.keys():
        assert_close(values[METRIC_OF[name]], step[name], 0.0, rtol,
                     f"{name} of step {step['step']}")


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
