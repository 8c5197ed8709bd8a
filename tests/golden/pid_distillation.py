"""Case F06: one update of a distillation phase from given draws, by the objective's own code."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from pid_jax.config import base_config
from pid_jax.models import build_model
from pid_jax.objectives import pid_student
from pid_jax.objectives.pid_student import DISCRIMINATOR, FAKE_SCORE, STUDENT, TEACHER, PidStudent
from pid_jax.training import freezing
from tests.golden.cases import Case, assert_close, handles
from tests.golden.layout import to_nchw, to_nhwc
from tests.golden.networks import GoldenNet, load_network

OURS = {"student": STUDENT, "teacher": TEACHER, "fake": FAKE_SCORE, "fake_score": FAKE_SCORE,
        "disc": DISCRIMINATOR, "discriminator": DISCRIMINATOR}

KEYS = {
    "student_update_freq": "distill.student_every", "student_sample_steps": "distill.steps",
    "student_t_list": "distill.times", "student_timestep": "distill.first_time",
    "student_sample_type": "distill.sampler", "student_input_mode": "distill.input",
    "prediction_type": "flow.prediction_type",
    "teacher_prediction_type": "distill.teacher_prediction_type",
    "dmd_timestep_clamp_min": "distill.time_min", "dmd_timestep_clamp_max": "distill.time_max",
    "teacher_cfg_scale": "distill.teacher_guidance", "gan_loss_weight_gen": "distill.gan_weight",
    "gan_warmup_steps": "distill.gan_warm_up_steps", "gan_r1_reg_weight": "distill.r1_weight",
    "gan_r1_reg_alpha": "distill.r1_alpha", "gan_use_same_t_noise": "distill.gan_same_noise",
    "vsd_loss_weight": "distill.vsd_weight", "dsm_loss_weight": "distill.dsm_weight",
    "clip_norm": "optim.clip_norm"}
"""The reference's options in a run's config."""

INPUTS = {"pidself_rollout": "self_rollout"}

METRICS = {"vsd_loss": "vsd_loss", "gan_loss_gen": "gan_loss", "dsm_loss": "dsm_loss",
           "gan_loss_disc": "discriminator_loss", "gan_loss_r1": "r1_loss"}


@handles("pid", r"F06.*")
def check_distillation(case: Case) -> None:
    nets = {OURS[key]: _load(case, OURS[key], key) for key in case.meta["params"]}
    runs = [Run(case, run, nets) for run in case.meta["runs"]]
    compiled: dict[str, Callable] = {}  # runs of the same options and phase share a program
    for run in runs:
        kind = json.dumps([run.run["phase"], run.run["overrides"], run.run["batch_used"]])
        run.check(compiled.setdefault(kind, run.update))


def _load(case: Case, name: str, reference: str) -> GoldenNet:
    one = dataclasses.replace(case)
    one.__dict__["meta"] = case.meta | {"params": case.meta["params"][reference]}
    return load_network(one, "discriminator", "disc_config") if name == DISCRIMINATOR else (
        load_network(one))


class Run:
    """One update from the initial networks."""

    def __init__(self, case: Case, run: dict, nets: dict[str, GoldenNet]):
        self.case, self.run, self.nets = case, run, nets
        self.config = _config(case.meta, run["overrides"])
        self.objective = PidStudent(self.config, nets[STUDENT].net, _discriminator(case), text=None,
                                    codec=None)
        self.inputs = {name: value[:run["batch_used"]] for name, value in case.inputs.items()
                       if "/" not in name and name != "null_caption_emb"}

    @functools.cached_property
    def phase(self) -> str:
        return OURS[self.run["phase"]]

    @functools.cached_property
    def update(self) -> Callable:
        """(state, examples) -> state, metrics, gradients, pictures on the way."""
        objective = self.objective
        objective.loss = self.recording(objective.loss)
        objective.fake_score_loss = self.recording(objective.fake_score_loss)
        move = {STUDENT: objective.update, FAKE_SCORE: objective.update_companions}[self.phase]

        @jax.jit
        def whole(state, examples):
            metrics, grads = objective.phase_gradients(self.phase, state, examples)
            pictures = metrics.pop("pictures")
            after, found = move(state, grads)
            return after, metrics | found, grads, pictures

        return whole

    def recording(self, loss: Callable) -> Callable:
        """The loss, whose metrics also hold the pictures that it passed by."""
        names = {"generate": "x0_student", "teacher_x0": "x0_teacher", "fake_x0": "x0_fake"}

        def recorded(params, examples):
            pictures = {}
            for method, name in names.items():
                self.record(method, lambda output, *_, name=name: pictures.update({name: output}))
            self.record("call", lambda output, weights, *_: pictures.update(
                {"fake_out": output.x} if weights is params[FAKE_SCORE] else {}))
            total, metrics = loss(params, examples)
            if self.phase == FAKE_SCORE:
                pictures["dsm_target"] = pid_student.losses.dsm_target(
                    pictures.pop("x0_student"), examples["eps"],
                    self.config.flow.prediction_type)
            else:
                pictures.pop("fake_out")
            return total, metrics | {"pictures": pictures}

        return recorded

    def record(self, method: str, note: Callable) -> None:
        """Makes a method of the objective show its output and arguments to `note`."""
        original = getattr(PidStudent, method)

        def recorded(*arguments, **options):
            output = original(self.objective, *arguments, **options)
            note(output, *arguments)
            return output

        setattr(self.objective, method, recorded)

    def check(self, update: Callable) -> None:
        name, phase = self.run["name"], self.phase
        assert self.objective.phase(self.run["iteration"]) == phase, name
        after, metrics, grads, drawn = update(self.start(), self.examples(phase))
        self.check_losses(metrics)
        for key, picture in drawn.items():
            assert_close(to_nchw(picture), self.case.outputs[f"{name}/{key}"],
                         self.case.tolerance["x0"]["atol"], self.case.tolerance["x0"]["rtol"],
                         f"{name}/{key}")
        self.check_gradients(phase, grads)
        self.check_parameters(phase, grads, pid_student.networks(after))
        self.check_norms(phase, metrics)

    def start(self):
        state = self.objective.start(jax.tree.map(jnp.asarray, self.nets[STUDENT].params))
        companions = {name: jax.tree.map(jnp.asarray, self.nets[name].params)
                      for name in state.companions}
        return state.replace(step=jnp.int32(self.run["iteration"]), companions=companions,
                             frozen={TEACHER: self.nets[TEACHER].params})

    def examples(self, phase: str) -> dict[str, Any]:
        """The reference's draws, in the order in which it drew them."""
        options, draws = self.config.distill, self.draws()
        examples = {"image": to_nhwc(self.inputs["x0"]), "text": self.inputs["caption_embs"],
                    "null_text": np.broadcast_to(self.case.inputs["null_caption_emb"],
                                                 self.inputs["caption_embs"].shape),
                    "latent": to_nhwc(self.inputs["lq_latent"]),
                    "sigma": self.inputs["degrade_sigma"], "noise": to_nhwc(next(draws)),
                    "step_index": np.zeros(self.run["batch_used"], np.int32)}
        if options.steps > 1:
            examples["step_index"] = next(draws).astype(np.int32)
        if self.objective.draws_fresh_noise:
            fresh = [to_nhwc(next(draws)) for _ in range(examples["step_index"][0])]
            fresh += [np.zeros_like(examples["image"])] * (options.steps - 1 - len(fresh))
            examples["fresh"] = np.stack(fresh, axis=1)
        examples["t"] = self.objective.clip_times(next(draws))
        examples["eps"] = to_nhwc(next(draws))
        if phase == FAKE_SCORE and self.objective.adversarial:
            if not options.gan_same_noise:
                examples["real_t"] = self.objective.clip_times(next(draws))
                examples["real_eps"] = to_nhwc(next(draws))
            if options.r1_weight:
                examples["r1_noise"] = to_nhwc(next(draws))
        assert next(draws, None) is None, f"{self.run['name']}: draws are left over"
        return examples

    def draws(self) -> Iterator[np.ndarray]:
        found = self.case.under(f"in/{self.run['name']}/")
        return iter([found[name] for name in sorted(found)])

    def check_losses(self, metrics) -> None:
        expected = {METRICS[name]: value for name, value in self.run["losses"].items()}
        expected["loss"] = self.run["total"]
        assert expected.keys() == {name for name in metrics if name.endswith("loss")}
        for name, value in expected.items():
            assert_close(metrics[name], value, 0.0, self.case.tolerance["loss"]["rtol"],
                         f"{self.run['name']}/{name}")

    def check_gradients(self, phase: str, grads) -> None:
        """Norms of every tensor before clipping, and the clipped gradients that are stored."""
        name, rtol = self.run["name"], self.case.tolerance["grad_norm"]["rtol"]
        found = {network: self.to_torch(network, grads[network]) for network in grads}
        for key, expected in self.run["per_param_grad_norm"].items():
            network, key = key.split("/", 1)
            norm = np.linalg.norm(found[OURS[network]][key].astype(np.float64))
            assert_close(norm, expected, 1e-7, rtol, f"{name}: norm of {network}/{key}")
        clipped = self.to_torch(phase, self.clipped(phase, grads[phase]))
        tolerance = self.case.tolerance["grad"]
        for key, expected in self.case.under(f"grad/{name}/").items():
            assert_close(clipped[key], expected, tolerance["atol_per_max"] * np.abs(expected).max(),
                         tolerance["rtol"], f"{name}: clipped gradient of {key}")

    def clipped(self, network: str, grads):
        clip = self.optimizer(network).clip
        layers, _ = freezing.partition(self.objective.mask, self.objective.mask)
        return clip(freezing.apply_mask(grads, layers))[0]

    def optimizer(self, network: str):
        return self.objective.optimizer if network == STUDENT else (
            self.objective.companion_optimizers[network])

    def to_torch(self, network: str, tree) -> dict[str, np.ndarray]:
        """Torch tensors of a tree that may lack the wholly frozen leaves."""
        mask = jax.tree.map(lambda _: True, self.nets[network].params)
        mask = mask if network == DISCRIMINATOR else self.objective.mask
        frozen = freezing.partition(self.nets[network].params, mask)[1]
        return self.nets[network].to_torch(freezing.combine(tree, frozen))

    def check_norms(self, phase: str, metrics) -> None:
        rtol = self.case.tolerance["grad_norm"]["rtol"]
        reference = {OURS[name]: norm for name, norm in self.run["grad_norms"].items()}
        assert_close(metrics["grad_norm"], reference[phase], 0.0, rtol, "norm before clipping")
        after = {OURS[name]: norm for name, norm in self.run["grad_norms_after_clip"].items()}
        bound = self.config.optim.clip_norm
        assert_close(min(bound, reference[phase]), after[phase], 0.0, rtol, "clipped norm")
        if "discriminator_grad_norm" in metrics:
            assert_close(metrics["discriminator_grad_norm"], after[DISCRIMINATOR], 0.0, rtol,
                         "norm of the discriminator's gradient, which is not clipped")

    def check_parameters(self, phase: str, grads, params) -> None:
        """Parameters after the update; where the gradient is tiny its sign may differ."""
        tolerance, name = self.case.tolerance["param_after1"], self.run["name"]
        small = tolerance["small_grad"]
        for key, expected in self.case.under(f"param_after1/{name}/").items():
            network, key = key.split("/", 1)
            after = self.to_torch(OURS[network], params[OURS[network]])[key]
            gradient = self.to_torch(OURS[network], grads[OURS[network]]).get(key)
            rate = self.optimizer(OURS[network]).learning_rate
            tiny = np.abs(gradient) < small["below"]
            atol = np.where(tiny, small["atol_in_lr"] * rate, 0) + tolerance["atol"]
            assert_close(after, expected, atol, name=f"{name}: {network}/{key} after the update")


def _discriminator(case: Case):
    return build_model("discriminator", **{
        key: tuple(value) if isinstance(value, list) else value
        for key, value in case.meta["disc_config"].items()})


def _config(meta: dict, overrides: dict) -> ConfigDict:
    """The case's values in a run's config."""
    config = base_config()
    for key, value in (meta["base_config"] | overrides).items():
        section, name = KEYS[key].split(".")
        value = () if value is None else tuple(value) if isinstance(value, list) else value
        with config.ignore_type():
            config[section][name] = INPUTS.get(value, value)
    optimizers = meta["optimizers"]
    _set_optimizer(config.optim, optimizers["student"])
    _set_optimizer(config.distill.fake_score, optimizers["fake_score"])
    _set_optimizer(config.distill.discriminator, optimizers["discriminator"])
    config.optim.f_start = (1.0,)
    return config


def _set_optimizer(section: ConfigDict, values: dict) -> None:
    section.lr, section.weight_decay = values["lr"], values["wd"]
    if "betas" in section:
        section.betas = tuple(values["betas"])
    if "eps" in section:
        section.eps = values["eps"]
