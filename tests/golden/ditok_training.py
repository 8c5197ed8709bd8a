"""Losses, samplers, averages, learning rates and cropping of the ditok cases."""

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from pid_jax.config import base_config
from pid_jax.data.geometry import adm_crop
from pid_jax.diffusion import clean_flow, heun
from pid_jax.diffusion.schedules import CycleSchedule
from pid_jax.objectives.base import make_averages
from pid_jax.objectives.ditok_stage2 import DiTokStage2
from pid_jax.objectives.jit_c2i import JitC2I
from pid_jax.training import ema, freezing
from tests.golden import ditok_support as support
from tests.golden.cases import Case, assert_close, handles
from tests.golden.ditok_jit import load_jit
from tests.golden.layout import to_nchw, to_nhwc


def _jit(case: Case) -> tuple[support.Part, JitC2I]:
    """Network and objective of a Denoiser of the reference."""
    options, config = case.meta["config"]["denoiser"], base_config()
    net = dict(case.meta["config"]["net"])
    assert (options["img_size"], options["class_num"]) == (net["input_size"], net["num_classes"])
    net |= {"attn_drop": options["attn_dropout"], "proj_drop": options["proj_dropout"]}
    config.jit.update({
        "p_mean": options["P_mean"], "p_std": options["P_std"], "t_eps": options["t_eps"],
        "noise_scale": options["noise_scale"], "label_drop": options["label_drop_prob"]})
    config.sample.update({
        "sampler": options["sampling_method"],
        "guidance_interval": (options["interval_min"], options["interval_max"]),
        "guidance": options["cfg"], "steps": options["num_sampling_steps"]})
    part = load_jit(net, support.parameters(case))
    return part, JitC2I(config, part.net)


def _examples(inputs: dict) -> dict:
    """Training examples with the case's own draws; no dropout seed, since nothing drops."""
    return {"noise": to_nhwc(inputs["noise"]), "t": jnp.asarray(inputs["t"]),
            "label": jnp.asarray(inputs["labels"])}


@handles("ditok", r"jit_denoiser_loss.*")
def check_denoiser(case: Case) -> None:
    part, objective = _jit(case)
    examples = _examples(case.inputs) | {"image": to_nhwc(case.inputs["x"])}

    @jax.jit
    def run(params):
        metrics, grads = objective.gradients(params, examples)
        z, out = objective.denoised(params, examples)
        speed = lambda x: clean_flow.velocity(x, z, examples["t"], objective.config.jit.t_eps)
        return metrics, grads, {"z": z, "x_pred": out.x, "v": speed(examples["image"]),
                                "v_pred": speed(out.x)}

    metrics, grads, pictures = run(part.params)
    support.compare(case, {name: to_nchw(value) for name, value in pictures.items()}
                    | {"loss": metrics["loss"]})
    prefix = "net." if any(name.startswith("net.") for name in case.under("grad/")) else ""
    support.compare(case, {prefix + key: value for key, value in part.to_torch(grads).items()},
                    "grad/")


@handles("ditok", r"jit_sample.*")
def check_sampler(case: Case) -> None:
    part, objective = _jit(case)
    labels = jnp.asarray(case.inputs["labels"])
    noise = to_nhwc(case.inputs["z0"])
    _check_trajectory(case, objective, part.params, noise, labels, ())


def _check_trajectory(case, objective, params, noise, labels, conditions) -> np.ndarray:
    """Every state and velocity; the picture of `draw` is the last state, clipped."""
    size, steps = noise.shape[1:3], objective.config.sample.steps
    table = objective.solver_table(*size, steps)
    null = jnp.full_like(labels, objective.net.num_classes)

    @jax.jit
    def run(params, noise):
        velocity = heun.guided_in_interval(
            lambda z, t, condition: objective.predict(params, z, t, condition),
            (labels, *conditions), (null, *conditions), table)
        drawn = objective.draw(params, noise / objective.config.jit.noise_scale, labels, table,
                               conditions=conditions)
        return heun.solve(velocity, noise, table, collect=True), drawn

    (_, states, velocities), drawn = run(params, noise)
    states = np.concatenate([noise[None], np.asarray(states)[table.ends == 1]])
    support.compare(case, {
        "trajectory": to_nchw(states), "final": to_nchw(states[-1]),
        "velocity_first_stage": to_nchw(np.asarray(velocities)[table.previous == 0]),
        "timesteps": heun.time_grid(steps), "image": to_nchw((drawn + 1) / 2)})
    assert_close(drawn, np.clip(states[-1], -1, 1), case.tolerance["atol"], name="draw")


@handles("ditok", r"jit_dual_ema.*")
def check_averages(case: Case) -> None:
    meta, config = case.meta["config"], base_config()
    config.ema.decay = meta["ema_decay1"]
    config.ema.others = (("ema2", "constant", meta["ema_decay2"]),)
    specs = make_averages(config.ema)
    averages, found = ema.init_ema(case.under("in/step0/"), specs), {}
    for step in range(1, meta["steps"] + 1):
        averages = ema.update_ema(averages, case.under(f"in/step{step}/"), step - 1, specs)
        for number, spec in enumerate(specs, 1):
            found |= {f"step{step}/ema{number}/{name}": value
                      for name, value in averages[spec.name].items()}
    support.compare(case, found)


@handles("ditok", r"center_crop.*")
def check_crop(case: Case) -> None:
    for number in sorted({name.split("/")[0] for name in case.inputs}):
        image = Image.fromarray(case.inputs[f"{number}/image"])
        crop = np.asarray(adm_crop(image, int(case.inputs[f"{number}/size"][0])))
        assert_close(crop, case.outputs[f"{number}/crop"], case.tolerance["atol"],
                     name=f"crop {number}")


@handles("ditok", r"lr_tables.*")
def check_learning_rates(case: Case) -> None:
    meta, inputs = case.meta["config"], case.inputs
    total, warm = meta["max_train_steps"], meta["warmup_steps"]
    epochs, floor = meta["jit"], meta["min_lr"] / meta["lr"]

    def rates(steps, length, warm_up, decay):
        schedule = CycleSchedule((warm_up,), (length,), (0.0,), (1.0,), (floor,), decay)
        return meta["lr"] * schedule(np.asarray(steps))

    steps, whole = inputs["steps"], "cosine_throughout"
    support.compare(case, {
        "seed_cosine_no_warmup": rates(steps, total, 0, whole),
        "linear_warmup_times_cosine": rates(steps, total, warm, whole),
        "titok_warmup_then_cosine": rates(steps, total, warm, "cosine"),
        "jit_warmup_cosine": rates(inputs["jit_epochs"], epochs["epochs"],
                                   epochs["warmup_epochs"], "cosine"),
        "torch_CosineAnnealingLR_T200": rates(np.arange(meta["torch_T"] + 1), meta["torch_T"], 0,
                                              whole)})


# ---- the design of DiTok ------------------------------------------------------------------------

_SAME_NAME = ("patch_size", "num_classes", "in_context_start")


def _ditok(loss_case: Case) -> tuple[support.Part, DiTokStage2]:
    """Network and objective of a stage-2 case."""
    meta, config = loss_case.meta["config"], base_config()
    decoder, known = meta["diffusion_decoder"], support.titok_options(meta["titok"])
    options = {name: value for name, value in known.items()
               if "dec" not in name} | {name: decoder[name] for name in _SAME_NAME}
    assert decoder["input_size"] == options["crop_size"]
    assert all(decoder[name] == options[name] for name in ("num_latent_tokens", "token_size"))
    options |= {"gamma_head": meta["gamma_weight"] > 0, "vit_dec_dims": tuple(
        decoder[name] for name in ("hidden_size", "depth", "num_heads", "bottleneck_dim"))}
    config.jit.update({"t_eps": meta["t_eps"], "noise_scale": meta["noise_scale"]})
    config.ditok.update({name: meta[name] for name in ("v_weight", "gamma_weight")})
    assert meta["perceptual_weight"] == 0
    tensors = loss_case.under("param/")
    tensors.pop("diffusion_decoder.pos_embed")
    part = support.load_part("ditok", options, tensors)
    return part, DiTokStage2(config, part.net)


@handles("ditok", r"ditok_design_loss.*")
def check_stage2(case: Case) -> None:
    part, objective = _ditok(case)
    image = 2 * to_nhwc(case.inputs["image"]) - 1
    examples = _examples(case.inputs) | {"image": image}

    @jax.jit
    def run(params):
        metrics, grads = objective.gradients(params, examples)
        codes, indices = objective.encode(params, image)
        z, out = objective.denoised(params, examples, codes)
        speed = lambda x: clean_flow.velocity(x, z, examples["t"], objective.config.jit.t_eps)
        pictures = {"v": speed(image), "v_pred": speed(out.x), "x_pred": out.x}
        return metrics, grads, pictures, {"z_q": codes, "indices": indices[:, None],
                                          "gamma": out.gamma}

    metrics, grads, pictures, found = run(part.params)
    np.testing.assert_array_equal(found["indices"], case.outputs["indices"])
    support.compare(case, found | metrics | {k: to_nchw(v) for k, v in pictures.items()})
    assert metrics["bpp_loss"] == metrics["perceptual_loss"] == 0
    _, frozen = freezing.partition(part.params, objective.mask)
    everything = freezing.combine(grads, jax.tree.map(np.zeros_like, frozen))
    support.compare(case, part.to_torch(everything), "grad/")


@handles("ditok", r"ditok_design_reconstruct.*")
def check_reconstruction(case: Case) -> None:
    source = Case(case.family, support.file_named(case).removesuffix(".safetensors"), case.folder)
    part, objective = _ditok(source)
    options = case.meta["config"]
    objective.config.sample.update({
        "sampler": options["method"], "guidance": options["cfg"], "steps": options["steps"],
        "guidance_interval": tuple(map(float, options["interval"]))})
    _check_trajectory(case, objective, part.params, to_nhwc(case.inputs["z0"]),
                      jnp.asarray(case.inputs["labels"]), (jnp.asarray(case.inputs["z_q"]),))
