"""Golden cases of the family pixeldit that are checkpoint files: they convert, draw, train on."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from pid_jax.config import base_config, to_json
from pid_jax.models import build_model, option_names
from pid_jax.objectives.pixeldit_c2i import PixelDitC2I
from pid_jax.parallel.mesh import single_device
from pid_jax.parallel.sharding import state_shardings
from pid_jax.training.checkpoint import (find_step_folder, load_for_inference, restore_state,
                                         with_shardings)
from tests.golden.cases import Case, assert_close, handles
from tests.golden.pid_networks import nchw, nhwc
from tools.convert_torch_weights.convert import Request, convert
from tools.convert_torch_weights.mappings import jax_to_torch, table_for
from tools.convert_torch_weights.readers import open_source
from tools.convert_torch_weights.verify import verify

PROJECTOR_IN_FILE, PROJECTOR = "diffusion_trainer.proj.0.", "repa_projector."
PARTS = {"net": "denoiser", "ema": "ema_denoiser"}


@handles("pixeldit", r"tiny_t2i_ckpt.*")
def check_text_to_image(case: Case) -> None:
    known = option_names("pixeldit_t2i")
    options = {key: value for key, value in case.meta["config"].items() if key in known}
    for name in case.meta["files"]:
        with tempfile.TemporaryDirectory() as work:
            file, dst = Path(work) / "config.json", Path(work) / "converted"
            _write_config(file, "pixeldit_t2i", options)
            convert(Request(str(case.folder / name), dst, config=str(file)))
            verify(str(case.folder / name), dst)
            _check(case, options, load_for_inference(dst)[1])


def _check(case: Case, options: dict, params: dict) -> None:
    found = jax_to_torch(table_for("pixeldit_t2i", options), jax.device_get(params))
    for key, value in case.under("state/core.").items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    network = build_model("pixeldit_t2i", **options)
    inputs = case.inputs
    out = network.apply({"params": params}, nhwc(inputs["x"]), inputs["t"], inputs["y"])
    assert_close(nchw(out.x), case.outputs["v"], **case.tolerance, name="v")


def _write_config(file: Path, model: str, options: dict, **repa) -> None:
    config = base_config()
    config.objective = model
    config.model = ConfigDict({"name": model, **options})
    config.repa.update(repa)
    file.write_text(to_json(config))


@handles("pixeldit", r"tiny_c2i_ckpt.*")
def check_class_conditional(case: Case) -> None:
    options, inputs = case.meta["config"], case.inputs
    net, table = build_model("pixeldit_c2i", **options), table_for("pixeldit_c2i", options)
    draw = jax.jit(lambda params: net.apply({"params": params}, nhwc(inputs["x"]), inputs["t"],
                                            jnp.asarray(inputs["y"])).x)
    for name in case.meta["files"]:
        with tempfile.TemporaryDirectory() as work:
            source, config = str(case.folder / name), Path(work) / "config.json"
            _write_config(config, "pixeldit_c2i", options)
            for part in _parts_of(source):
                dst = Path(work) / part
                convert(Request(source, dst, config=str(config), which=part))
                verify(source, dst, part)
                params = load_for_inference(dst)[1]
                _compare_weights(case, f"state/{PARTS[part]}.",
                                 jax_to_torch(table, jax.device_get(params)))
                assert_close(nchw(draw(params)), case.outputs[f"v_{PARTS[part]}"],
                             **case.tolerance, name=f"{name} v_{PARTS[part]}")


def _parts_of(source: str) -> list[str]:
    tensors = open_source(source).tensors
    return [part for part, prefix in PARTS.items()
            if any(key.startswith(f"state_dict.{prefix}.") for key in tensors)]


def _compare_weights(case: Case, prefix: str, found: dict) -> None:
    for key, value in case.under(prefix).items():
        np.testing.assert_array_equal(found[key], value, err_msg=f"{prefix}{key}")


@handles("pixeldit", r"tiny_c2i_ckpt.*")
def check_training_state(case: Case) -> None:
    """Weights, average, projector and moments of a whole checkpoint become a state to go on from.
    """
    projector = case.under(f"state/{PROJECTOR_IN_FILE}")
    options = case.meta["config"] | {"repa_features": len(projector["4.weight"]),
                                     "repa_width": projector["4.weight"].shape[1]}
    for name in case.meta["files"]:
        source = case.folder / name
        if not any(key.startswith("optimizer_states") for key in open_source(source).tensors):
            continue
        with tempfile.TemporaryDirectory() as work:
            config, dst = Path(work) / "config.json", Path(work) / "converted"
            _write_config(config, "pixeldit_c2i", options, weight=0.5, block=1)
            convert(Request(str(source), dst, config=str(config), training_state=True))
            _check_state(case, options, dst, open_source(source).tensors)


def _check_state(case: Case, options: dict, folder: Path, tensors: dict) -> None:
    objective = PixelDitC2I(base_config(), build_model("pixeldit_c2i", **options))
    abstract = jax.eval_shape(objective.init, jax.random.key(0))
    abstract = with_shardings(abstract, state_shardings(abstract, single_device()))
    state, _ = restore_state(find_step_folder(folder), abstract)
    table = table_for("pixeldit_c2i", options)
    to_torch = lambda tree: jax_to_torch(table, jax.device_get(tree))
    assert int(state.step) == case.meta["global_step"]
    _compare_weights(case, "state/denoiser.", to_torch(state.params))
    _compare_weights(case, "state/ema_denoiser.", to_torch(state.ema["ema"]))
    adam = state.opt_state.adam[0]
    for moment, field in ((adam.mu, "exp_avg"), (adam.nu, "exp_avg_sq")):
        found = to_torch(moment)
        for index, key in enumerate(case.meta["optimizer_param_order"]):
            stored = tensors[f"optimizer_states.0.state.{index}.{field}"].read()
            ours = key.replace(PROJECTOR_IN_FILE, PROJECTOR)
            np.testing.assert_array_equal(found[ours], stored, err_msg=f"{field} of {key}")
    assert int(adam.count) == int(tensors["optimizer_states.0.state.0.step"].read())
