"""Golden cases of the family pixeldit: losses, gradients, and whole updates of both recipes."""

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from pid_jax.config import base_config
from pid_jax.data import captions
from pid_jax.diffusion import losses, time_sampling
from pid_jax.encoders.repa_teacher import dino_input
from pid_jax.objectives.pixeldit_c2i import PixelDitC2I
from pid_jax.objectives.pixeldit_t2i import PixelDitT2I
from tests.golden.cases import Case, assert_close, handles
from tests.golden.layout import to_nchw, to_nhwc
from tests.golden.networks import GoldenNet
from tests.golden.pixeldit_networks import PROJECTOR, compare, load_network

DROPOUT = 0.1


def _c2i_network(case: Case) -> GoldenNet:
    projector = {name.removeprefix("0."): value
                 for name, value in case.under("params_proj/").items()}
    return load_network(case, "pixeldit_c2i", projector)


def _assert_scalar(case: Case, actual, expected, name: str) -> None:
    rtol = case.tolerance["loss_rtol"]
    assert_close(actual, expected, rtol, rtol, name)


def _assert_gradients(case: Case, actual: dict[str, np.ndarray],
                      expected: dict[str, np.ndarray]) -> None:
    share = case.tolerance["grads"]["atol_rel_to_max"]
    for name, value in expected.items():
        assert_close(actual[name], value, share * np.abs(value).max() + 1e-12,
                     name=f"gradient of {name}")


# ---- class-conditional --------------------------------------------------------------------------

def _c2i_config(weight: float, block: int, shift: float, lognorm: bool) -> ConfigDict:
    config = base_config()
    config.flow.update({"shift": shift, "time_distribution": "logit_normal" if lognorm
                        else "uniform"})
    config.repa.update({"weight": weight, "block": block})
    config.data.caption_dropout = DROPOUT
    return config


def _c2i_examples(objective: PixelDitC2I, draws: dict[str, np.ndarray], features: np.ndarray
                  ) -> dict[str, np.ndarray]:
    """What `examples` would draw, from given draws; labels drop as the pipeline drops captions."""
    texts = [captions.drop(str(label), draw, objective.config.data.caption_dropout)
             for label, draw in zip(draws["y"], draws["drop_uniform"])]
    return {"image": to_nhwc(draws["x"]), "label": objective.labels(texts),
            "noise": to_nhwc(draws["noise"]), "t": objective.times(draws["base_t"]),
            "features": features}


@handles("pixeldit", r"c2i_loss.*")
def check_c2i_loss(case: Case) -> None:
    network = _c2i_network(case)
    with_gradients = {name.split("/")[0] for name in case.under("grads/")}
    for number, run in enumerate(case.meta["variants"]):
        name = run["name"]
        objective = PixelDitC2I(_c2i_config(run["w"], case.meta["align_layer"], run["shift"],
                                            run["lognorm"]), network.net)
        draws, expected = case.under(f"in/{name}/"), case.under(f"out/{name}/")
        examples = _c2i_examples(objective, draws, case.inputs["encoder_features"])
        assert (examples["label"] == draws["y_after_drop"]).all(), f"{name}/labels"
        assert_close(examples["t"], expected["t"], 1e-6, name=f"{name}/t")
        differentiated = number == 0 and with_gradients
        loss = jax.value_and_grad(objective.loss, has_aux=True) if differentiated else (
            lambda params, examples: (objective.loss(params, examples), None))
        (total, metrics), grads = jax.jit(loss)(network.params, examples)
        for key, value in (("loss", total), ("fm_loss", metrics["flow_loss"]),
                           ("cos_loss", metrics["repa_loss"])):
            _assert_scalar(case, value, expected[key], f"{name}/{key}")
        if differentiated:
            _assert_gradients(case, network.to_torch(grads), _c2i_named(case, "grads/denoiser/",
                                                                        "grads/proj/0."))


def _c2i_named(case: Case, network: str, projector: str) -> dict[str, np.ndarray]:
    """Tensors of the denoiser and of the projector under this project's torch names."""
    return case.under(network) | {PROJECTOR + name: value
                                  for name, value in case.under(projector).items()}


@handles("pixeldit", r"c2i_train.*")
def check_c2i_updates(case: Case) -> None:
    network, optimizer = _c2i_network(case), case.meta["optimizer"]
    assert optimizer["type"] == "AdamW"
    config = _c2i_config(case.meta["repa_weight"], case.meta["align_layer"], 1.0, True)
    config.optim.update({"lr": optimizer["lr"], "betas": tuple(optimizer["betas"]),
                         "eps": optimizer["eps"], "weight_decay": optimizer["weight_decay"],
                         "clip_norm": optimizer["clip_norm"], "f_start": (1.0,)})
    config.ema.decay = case.meta["ema_decay"]
    objective = PixelDitC2I(config, network.net)
    state = objective.start(jax.tree.map(jnp.asarray, network.params))

    @jax.jit
    def update(state, examples):
        values, grads = objective.gradients(state.params, examples)
        state, metrics = objective.update(state, grads)
        return state, values | metrics

    for step in range(len({name.split("/")[0] for name in case.inputs})):
        draws, expected = case.under(f"in/step{step}/"), case.under(f"out/step{step}/")
        state, values = update(state, _c2i_examples(objective, draws, draws["encoder_features"]))
        for key in ("loss", "grad_norm"):
            _assert_scalar(case, values[key], expected[key], f"step {step} {key}")
    lr = optimizer["lr"]
    params = _c2i_named(case, "params_after/", "params_after_proj/0.")
    for tree, expected, tolerance in ((state.params, params, "params_atol_in_lr"),
                                      (state.ema["ema"], case.under("ema_after/"),
                                       "ema_atol_in_lr")):
        found = network.to_torch(tree)
        for name, value in expected.items():
            assert_close(found[name], value, case.tolerance[tolerance] * lr, name=name)


@handles("pixeldit", r"c2i_repa_resize.*")
def check_token_grids(case: Case) -> None:
    for run in sorted({name.split("/")[0] for name in case.inputs}):
        inputs, expected = case.under(f"in/{run}/"), case.under(f"out/{run}/")
        resized = losses.fit_tokens(inputs["src"], inputs["dst"].shape[1])
        compare(case, resized, expected["resized"], f"{run}/resized")
        compare(case, losses.alignment_loss(inputs["src"], inputs["dst"]), expected["loss"],
                f"{run}/loss")


@handles("pixeldit", r"c2i_dino_input.*")
def check_dino_input(case: Case) -> None:
    signed = 2 * to_nhwc(case.inputs["raw_image"]) - 1
    compare(case, to_nchw(dino_input(signed)), case.outputs["dino_input"], "dino_input")


# ---- text-to-image ------------------------------------------------------------------------------

@handles("pixeldit", r"t2i_loss.*")
def check_t2i_loss(case: Case) -> None:
    network = load_network(case, "pixeldit_t2i", case.under("params/_repa_projector."))
    config = base_config()
    config.flow.update({"shift": case.meta["flow_shift"], "time_steps": 1000})
    config.repa.update({"weight": case.meta["repa_weight"],
                        "block": case.meta["config"]["repa_encoder_index"]})
    objective = PixelDitT2I(config, network.net, text=None)
    _check_table(case, config)
    frozen = {key for key, trains in _t2i_names(network, objective.mask).items() if not trains}
    assert frozen == {name.removeprefix("core.") for name in case.meta["no_grad_params"]}
    gradients_left = {_t2i_name(name): value for name, value in case.under("grads/").items()}
    for run in sorted({name.split("/")[0] for name in case.inputs}, key=lambda run: int(run[3:])):
        inputs, expected = case.under(f"in/{run}/"), case.under(f"out/{run}/")
        sizes_fit = inputs["encoder_tokens"].shape[1] == _patches(case)
        examples = {"image": to_nhwc(inputs["x"]), "text": inputs["y"],
                    "noise": to_nhwc(inputs["noise"]), "features": inputs["encoder_tokens"],
                    **objective.discrete_times(inputs["timestep"], *case.meta["image"])}
        loss = jax.value_and_grad(objective.loss, has_aux=True) if sizes_fit else (
            lambda params, examples: (objective.loss(params, examples), None))
        (total, metrics), grads = jax.jit(loss)(network.params, examples)
        for key, value in (("loss", total), ("fm_loss", metrics["flow_loss"]),
                           ("repa_loss", metrics["repa_loss"])):
            _assert_scalar(case, value, expected[key], f"{run}/{key}")
        if sizes_fit:
            _assert_gradients(case, network.to_torch(grads), gradients_left)


def _patches(case: Case) -> int:
    height, width = case.meta["image"]
    return height * width // case.meta["config"]["patch_size"] ** 2


def _check_table(case: Case, config: ConfigDict) -> None:
    steps = config.flow.time_steps
    times, network_times = time_sampling.discrete_table(steps, config.flow.shift)
    assert_close(times, case.outputs["sigma_table"], 1e-6, name="sigma_table")
    assert_close(network_times, np.floor(case.outputs["timestep_table"]), 0, name="timesteps")


def _t2i_name(name: str) -> str:
    return name.removeprefix("core.").replace("_repa_projector.", PROJECTOR)


def _t2i_names(network: GoldenNet, mask) -> dict[str, bool]:
    full = jax.tree.map(lambda leaf, keep: np.broadcast_to(keep, leaf.shape), network.params, mask)
    return {key: bool(value.all()) for key, value in network.to_torch(full).items()}
