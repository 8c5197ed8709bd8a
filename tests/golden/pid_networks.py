"""Golden cases of the networks: A (forward, taps, gradients) and H (full-size names and shapes).

A case's `net` chooses the model, its `config` the options. Layouts change at the border only:
images and latents NCHW <-> NHWC, parameters and gradients through the weight mapping.
"""

import functools
import gzip
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.models import build_model
from pid_jax.models.rope import image_rope, text_rope
from tests.golden.cases import Case, assert_close, handles
from tools.convert_torch_weights.mappings import jax_to_torch, table_for, torch_to_jax

MODEL_OF_NET = {"PixDiT_T2I": "pixeldit_t2i", "PidNet": "pidnet",
                "Discriminator_ImageDiT": "discriminator"}
ARGUMENT_OF_INPUT = {"lq_video_or_image": "lq_image"}  # other inputs keep their name
FIELD_OF_COTANGENT = {"cotangent": "x", "cotangent_aux": "lq_rgb"}
FIELD_OF_OUTPUT = {"x": "x", "pred_lq_rgb": "lq_rgb", "last_repa_tokens": "repa_tokens"}


class Network:
    """The network, parameters and inputs of one case, in this project's layouts."""

    def __init__(self, case: Case):
        self.case = case
        self.name = MODEL_OF_NET[case.meta["net"]]
        self.options = dict(case.meta["config"])
        self.table = table_for(self.name, self.options)
        self.params = torch_to_jax(self.table, case.params())
        self.net = build_model(self.name, **self.options)
        inputs = {k: v for k, v in case.inputs.items() if not k.startswith("cotangent")}
        self.inputs = {ARGUMENT_OF_INPUT.get(k, k): _input(k, v) for k, v in inputs.items()}
        self.static = {k: tuple(v) if isinstance(v, list) else v
                       for k, v in case.meta["call_kwargs"].items()}

    def forward(self, params, inputs):
        return self.net.apply({"params": params}, **inputs, **self.static)

    def captured(self, params, inputs):
        """The output and the intermediates that the network shows."""
        out, state = self.net.apply({"params": params}, **inputs, **self.static,
                                    mutable="intermediates")
        return out, state["intermediates"]

    def loss(self, params, inputs):
        """The scalar that the case differentiates (outputs times their cotangents), the output."""
        out = self.forward(params, inputs)
        cotangents = {name: nhwc(value) for name, value in self.case.inputs.items()
                      if name.startswith("cotangent")}
        return sum(jnp.sum(getattr(out, FIELD_OF_COTANGENT[name]) * value)
                   for name, value in cotangents.items()), out


def nhwc(x: np.ndarray) -> np.ndarray:
    return x.transpose(0, 2, 3, 1)


def nchw(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).transpose(0, 3, 1, 2)


def _input(name: str, value: np.ndarray) -> np.ndarray:
    if name == "mask":
        return value.reshape(value.shape[0], -1)
    return nhwc(value) if value.ndim == 4 else value


@handles("pid", r"A\d+.*")
def check_eager(case: Case) -> None:
    network = Network(case)
    out, intermediates = network.captured(network.params, network.inputs)
    _compare_outputs(case, out)
    _compare_taps(case, taps(intermediates))


@handles("pid", r"A\d+.*")
def check_compiled(case: Case) -> None:
    network = Network(case)
    if not (case.under("grad/") or case.under("grad_in/")):
        _compare_outputs(case, jax.jit(network.forward)(network.params, network.inputs))
        return
    gradient = jax.jit(jax.grad(network.loss, argnums=(0, 1), has_aux=True, allow_int=True))
    (of_params, of_inputs), out = gradient(network.params, network.inputs)
    _compare_outputs(case, out)
    _compare_gradients(case, jax_to_torch(network.table, of_params), of_inputs)


@handles("pid", r"A\d+.*")
def check_early_exit(case: Case) -> None:
    """The reference runs all patch blocks before it leaves early, we stop at the last feature.

    What it has made by then (the REPA tap) is compared with a run that does not leave early.
    """
    network = Network(case)
    if network.static.pop("return_features_early", False):
        out = jax.jit(network.forward)(network.params, network.inputs)
        assert out.repa_tokens is not None
        _compare_outputs(case, out)


def _compare_outputs(case: Case, out) -> None:
    tolerance = case.tolerance["forward"]
    compare = functools.partial(assert_close, atol=tolerance["atol"], rtol=tolerance["rtol"])
    for name, expected in case.outputs.items():
        if name in FIELD_OF_OUTPUT:
            value = getattr(out, FIELD_OF_OUTPUT[name])
            if value is None and case.meta["call_kwargs"].get("return_features_early"):
                continue  # see check_early_exit
            compare(nchw(value) if expected.ndim == 4 else value, expected, name=name)
        elif match := re.fullmatch(r"feature_(\d+)", name):
            compare(nchw(out.features[int(match[1])]), expected, name=name)


def _compare_taps(case: Case, found: dict[str, np.ndarray]) -> None:
    for name, value in case.under("out/tap/").items():
        atol = case.tolerance["tap"]["atol_per_max_of_1_and_std"] * max(1, value.std())
        assert_close(found[name], value, atol, name=f"tap {name}")


def taps(intermediates: dict) -> dict[str, np.ndarray]:
    """Captured intermediates under the names and in the layouts of the reference."""
    found = {}
    for name, (value,) in intermediates.items():
        if name == "patch_blocks":
            for i, (image, text) in enumerate(zip(*value)):
                found |= {f"patch_block_{i}/img": image, f"patch_block_{i}/txt": text}
        elif name == "pixel_blocks":
            found |= {f"pixel_block_{i}": _pixels(z) for i, z in enumerate(value)}
        elif name == "pixel_embedder":
            found[name] = _pixels(value)
        elif name == "lq_proj":
            heads = [*value, *intermediates.get("lq_proj_pit", ())]
            found |= {f"lq_proj_{i}": tokens for i, tokens in enumerate(heads)}
        else:
            found[name] = value
    return found


def _pixels(z) -> np.ndarray:
    """[B, L, C, P] -> [B * L, P, C]."""
    return np.asarray(z).swapaxes(-1, -2).reshape(-1, z.shape[-1], z.shape[-2])


@handles("pid", r"A\d+.*")
def check_rope_tables(case: Case) -> None:
    config, outputs = case.meta["config"], case.outputs
    if not any(name.startswith("rope_") for name in outputs):
        return
    head_dim = config["hidden_size"] // config["num_groups"]
    patch = config["patch_size"]
    grid = tuple(n // patch for n in case.inputs["x"].shape[2:])
    reference = (config["rope_ref_h"] // patch, config["rope_ref_w"] // patch)
    tables = {"img": image_rope(head_dim, grid, config["rope_mode"], reference),
              "txt": text_rope(head_dim, config["txt_max_length"], config["text_rope_theta"])}
    for kind, table in tables.items():
        for part in ("cos", "sin"):
            expected = outputs[f"rope_{kind}_{part}"]
            assert_close(getattr(table, part), expected, 1e-6, name=f"rope {kind} {part}")


def _compare_gradients(case: Case, of_params: dict, of_inputs: dict) -> None:
    expected = case.under("grad/")
    for name, value in expected.items():
        _assert_gradient(case, of_params[name], value, name)
    for name in case.meta["params_without_grad"] or ():
        assert not np.any(of_params[name]), f"{name}: gradient is not zero"
    for name, value in case.under("grad_in/").items():
        gradient = of_inputs[ARGUMENT_OF_INPUT.get(name, name)]
        _assert_gradient(case, nchw(gradient) if value.ndim == 4 else gradient, value, name)


def _assert_gradient(case: Case, actual, expected: np.ndarray, name: str) -> None:
    tolerance = case.tolerance["grad"]
    relative, absolute = re.fullmatch(
        r"([\d.e+-]+)\*max\|grad of that tensor\|\+([\d.e+-]+)", tolerance["atol"]).groups()
    atol = float(relative) * np.abs(expected).max() + float(absolute)
    assert_close(actual, expected, atol, tolerance["rtol"], name=f"gradient of {name}")


@handles("pid", r"D03.*")
def check_discriminator(case: Case) -> None:
    options = case.meta["config"]
    table, net = table_for("discriminator", options), build_model("discriminator", **options)
    assert list(net.taps) == case.meta["effective_feature_indices"]
    params = torch_to_jax(table, case.params())
    features = [nhwc(case.inputs[f"feature_{k}"]) for k in range(len(net.taps))]

    def loss(params, features):
        logits = net.apply({"params": params}, features)
        return jnp.sum(logits * case.inputs["cotangent"]), logits

    gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
    for run in (gradient, jax.jit(gradient)):
        (of_params, of_features), logits = run(params, features)
        found = {"out/logits": logits}
        found |= {f"grad/{k}": v for k, v in jax_to_torch(table, of_params).items()}
        found |= {f"grad_in/feature_{k}": nchw(v) for k, v in enumerate(of_features)}
        for name, expected in case.tensors.items():
            if not name.startswith("in/"):
                assert_close(found[name], expected, case.tolerance["atol"], case.tolerance["rtol"],
                             name)


@handles("pid", r"H\d+.*")
def check_full_size_names(case: Case) -> None:
    with gzip.open(case.folder / f"{case.name}.json.gz") as file:
        networks = json.load(file)
    for name, network in networks.items():
        table = table_for(MODEL_OF_NET[network["net"]], network["config"])
        expected = {key: tuple(shape) for key, (shape, _) in network["keys"].items()}
        assert table.shapes() == expected, name
        total = sum(math.prod(leaf.shape) for leaf in table.leaves.values())
        assert total == network["total_params"], name
