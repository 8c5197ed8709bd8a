"""Groups F03 and F04: whole training steps, run by the objectives' own loss and update."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.config import base_config
from pid_jax.diffusion import degrade, time_sampling
from pid_jax.encoders.protocols import LatentCodec
from pid_jax.models import build_model
from pid_jax.objectives.base import Objective
from pid_jax.objectives.pid_teacher import PidTeacher
from pid_jax.objectives.pixeldit_t2i import PixelDitT2I
from pid_jax.training import freezing
from tests.golden.cases import Case, assert_close, handles
from tests.golden.layout import to_nhwc
from tools.convert_torch_weights.mappings import jax_to_torch, table_for, torch_to_jax

MODEL_OF_NET = {"PixDiT_T2I": "pixeldit_t2i", "PidNet": "pidnet"}


@dataclasses.dataclass(frozen=True)
class Run:
    """An objective with the case's values, and its parameters under their torch names."""

    case: Case
    objective: Objective

    @functools.cached_property
    def table(self):
        return table_for(MODEL_OF_NET[self.case.meta["net"]], self.case.meta["config"])

    def to_torch(self, params) -> dict[str, np.ndarray]:
        return {k: np.asarray(v) for k, v in jax_to_torch(self.table, params).items()}

    def state(self):
        params = jax.tree.map(jnp.asarray, torch_to_jax(self.table, self.case.params()))
        return self.objective.start(params)

    def gradients(self, state, examples):
        """Metrics and clipped gradients, a whole tree with zeros where nothing trains."""
        metrics, grads = jax.jit(self.objective.gradients)(state.params, examples)
        moving, _ = freezing.partition(self.objective.mask, self.objective.mask)
        clipped, _, _ = self.objective.optimizer.clip(freezing.apply_mask(grads, moving))
        _, frozen = freezing.partition(state.params, self.objective.mask)
        return metrics, grads, freezing.combine(clipped, jax.tree.map(jnp.zeros_like, frozen))


def make_run(case: Case) -> Run:
    """The objective that the case's network trains under, with the case's optimizer values."""
    meta, config = case.meta, base_config()
    options, shift = meta["optimizer"], meta["dynamic_shift"]
    config.optim.update({"lr": options["lr"], "betas": tuple(options["betas"]),
                         "eps": options["eps"], "weight_decay": options["weight_decay"],
                         "clip_norm": meta["clip_norm"]})
    config.optim.f_start = (options["lr_multiplier"],)
    config.flow.update({"dynamic_shift": True, "dynamic_base_shift": shift["base_shift"],
                        "dynamic_image_size": shift["base_image_size_for_shift_calc"],
                        "prediction_type": meta.get("prediction_type", "velocity")})
    net = build_model(MODEL_OF_NET[meta["net"]], **meta["config"])
    if meta["net"] == "PixDiT_T2I":
        return Run(case, PixelDitT2I(config, net, text=None))
    config.align.update({"enabled": True, "weight": meta["align_weight"], **meta["align"]})
    return Run(case, PidTeacher(config, net, text=None, codec=LatentCodec))


@handles("pid", r"F03.*")
def check_text_to_image_steps(case: Case) -> None:
    run = make_run(case)
    image = degrade.normalize_image(to_nhwc(case.inputs["image_uint8"]))
    _check_steps(run, [_text_to_image_examples(run, image, i, step)
                       for i, step in enumerate(case.meta["steps"])])


def _text_to_image_examples(run: Run, image, i: int, step: dict) -> dict:
    drawn = run.case.under(f"in/step{i}/")
    shift = run.objective.shift(*image.shape[1:3])
    assert_close(shift, step["shift"], 0, 1e-12, "shift")
    t = time_sampling.shift_time(time_sampling.logit_normal(jnp.asarray(drawn["t_normal"])), shift)
    assert_close(t, drawn["t"], 1e-6, name="t")
    return {"image": image, "text": run.case.inputs["caption_embs"],
            "noise": to_nhwc(drawn["noise"]), "t": drawn["t"]}


@handles("pid", r"F04.*")
def check_teacher_steps(case: Case) -> None:
    run = make_run(case)
    _check_trainable(run)
    _check_steps(run, [_teacher_examples(run, i, step)
                       for i, step in enumerate(case.meta["steps"])])


def _check_trainable(run: Run) -> None:
    state = run.state()
    trainable, frozen = freezing.partition(state.params, run.objective.mask)
    marked = freezing.combine(jax.tree.map(jnp.ones_like, trainable),
                              jax.tree.map(jnp.zeros_like, frozen))
    names = {name for name, value in run.to_torch(marked).items() if value.any()}
    assert names == set(run.case.meta["trainable"])


def _teacher_examples(run: Run, i: int, step: dict) -> dict:
    inputs, drawn = run.case.inputs, run.case.under(f"in/step{i}/")
    image, latent = to_nhwc(inputs["x0"]), to_nhwc(drawn["lq_latent_cond"])
    assert_close(run.objective.shift(*image.shape[1:3]), step["shift"], 0, 1e-12, "shift")
    sigma = drawn["degrade_sigma"]
    return {"image": image, "text": inputs["caption_embs"], "noise": to_nhwc(drawn["noise"]),
            "t": drawn["t"], "latent": latent, "sigma": sigma,
            **run.objective.alignment_target(to_nhwc(inputs["lq_image"]), latent, sigma)}


METRIC_OF = {"loss": "loss", "total": "loss", "diffusion_loss": "flow_loss",
             "lq_latent_image_align_loss": "align_loss"}


def _check_steps(run: Run, all_examples: list[dict]) -> None:
    state, update = run.state(), jax.jit(run.objective.update)
    smallest = None
    for i, (examples, step) in enumerate(zip(all_examples, run.case.meta["steps"]), start=1):
        metrics, grads, clipped = run.gradients(state, examples)
        for name in METRIC_OF.keys() & step.keys():
            assert_close(metrics[METRIC_OF[name]], step[name], 0,
                         run.case.tolerance["loss"]["rtol"], f"{name} of step {i}")
        state, values = update(state, grads)
        assert_close(values["grad_norm"], step["returned_norm"], 0, 1e-4, f"norm of step {i}")
        if i == 1:
            _compare(run, "grad_clipped", clipped, _gradient_bound(run.case))
        size = {k: np.abs(v) for k, v in run.to_torch(clipped).items()}
        smallest = size if smallest is None else {
            k: np.minimum(v, smallest[k]) for k, v in size.items()}
        _compare(run, f"param_after{i}", state.params, _parameter_bound(run.case, smallest))
    _compare(run, f"ema_after{i}", state.ema["ema"], _parameter_bound(run.case, smallest))


def _compare(run: Run, prefix: str, params, bound) -> None:
    """Compares what the case holds under `<prefix>/` and `<prefix>@rows4/` (every 4th row)."""
    found = run.to_torch(params)
    for mark, pick in (("", lambda a: a), ("@rows4", lambda a: a[::4])):
        for name, expected in run.case.under(f"{prefix}{mark}/").items():
            atol, rtol = bound(name, expected, pick)
            difference = np.abs(pick(found[name]).astype(np.float64) - expected)
            excess = difference - atol - rtol * np.abs(expected)
            assert excess.max() <= 0, f"{prefix} {name}: {difference.max()}, over by {excess.max()}"


def _gradient_bound(case: Case):
    """`1e-4*max|grad tensor|+1e-9`, and a relative part."""
    words = case.tolerance["grad"]
    scale, least = map(float, re.fullmatch(r"(.+)\*max\|grad tensor\|\+(.+)",
                                           words["atol"]).groups())
    return lambda name, expected, pick: (scale * np.abs(expected).max() + least, words["rtol"])


def _parameter_bound(case: Case, smallest: dict[str, np.ndarray]):
    """A number, and two learning rates more where a gradient is so small that its sign is noise."""
    words = case.tolerance["param"]["atol"]
    number = r"(\d[\d.]*e-\d+)"
    least = float(re.search(rf"else {number}|^{number};", words).group(0).strip("else ;"))
    threshold = float(re.search(rf"grad\| ?< ?{number}", words)[1])
    rate = case.meta["optimizer"]["lr"]

    def bound(name, expected, pick):
        return np.where(pick(smallest[name]) < threshold, 2 * rate, 0) + least, 0

    return bound
