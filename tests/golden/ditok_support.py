"""Networks, parameters and layouts of the ditok cases."""

import dataclasses
import re
from collections.abc import Mapping

import flax.linen as nn
import jax
import numpy as np
from safetensors.numpy import load_file

from pid_jax.models import build_model, init_parameters
from tests.golden.cases import Case, assert_close
from tools.convert_torch_weights.mappings import NETWORKS, Table, jax_to_torch, torch_to_jax
from tools.convert_torch_weights.mappings.engine import make_table


@dataclasses.dataclass(frozen=True)
class Part:
    """Some of a network's parameters, in our layouts, with the way back."""

    net: nn.Module
    params: dict
    table: Table

    def to_torch(self, tree) -> dict[str, np.ndarray]:
        return {key: np.asarray(value) for key, value in jax_to_torch(self.table, tree).items()}

    def apply(self, params, *args, **kwargs):
        return self.net.apply({"params": params}, *args, **kwargs)


def load_part(name: str, options: Mapping, tensors: Mapping[str, np.ndarray],
              parts: tuple[str, ...] = ()) -> Part:
    """The network and the parameters below the top-level names `parts` (none: all of them)."""
    net = build_model(name, **options)
    abstract = jax.eval_shape(lambda key: init_parameters(net, key), jax.random.key(0))
    if parts:
        abstract = {part: abstract[part] for part in parts}
    table = make_table(name, NETWORKS[name].rules(net), abstract)
    return Part(net, torch_to_jax(table, tensors), table)


def titok_options(config: Mapping) -> dict:
    """Our options from a TiTok config of the reference and the sizes that a case names."""
    options = {key: value for key, value in config["model"]["vq_model"].items()}
    dims = config["vit_dims"]
    assert dims.get("mlp_ratio", 4) == 4
    size = (dims["width"], dims["num_layers"], dims["num_heads"])
    return options | {"vit_enc_dims": size, "vit_dec_dims": size,
                      "crop_size": config["dataset"]["preprocessing"]["crop_size"]}


def pixel_options(config: Mapping) -> dict:
    """Our options from a MaskGIT-VQGAN config."""
    assert (config["num_channels"], config["dropout"]) == (3, 0.0)
    assert config["num_resolutions"] == len(config["channel_mult"])
    return {"hidden_channels": config["hidden_channels"],
            "channel_mult": tuple(config["channel_mult"]),
            "num_res_blocks": config["num_res_blocks"], "z_channels": config["z_channels"]}


def parameters(case: Case) -> dict[str, np.ndarray]:
    """The case's torch parameters, its own or those of the file that it names."""
    if own := case.under("param/"):
        return own
    tensors = load_file(case.folder / file_named(case))
    return {key.removeprefix("param/"): value for key, value in tensors.items()
            if not key.startswith(("in/", "out/", "grad/"))}


def file_named(case: Case) -> str:
    """The safetensors file that `params_in` begins with."""
    return re.match(r"[\w.]+\.safetensors", case.meta["params_in"])[0]


def from_torch_tokens(z: np.ndarray) -> np.ndarray:
    """[B, C, 1, K] -> [B, K, C]."""
    return z[:, :, 0].swapaxes(1, 2)


def to_torch_tokens(z) -> np.ndarray:
    """[B, K, C] -> [B, C, 1, K]."""
    return np.asarray(z).swapaxes(1, 2)[:, :, None]


def compare(case: Case, actual: Mapping, under: str = "out/") -> None:
    """Every tensor of the case below `under` against ours of that name; none may be left over."""
    expected = case.under(under)
    assert expected.keys() <= actual.keys(), sorted(expected.keys() - actual.keys())
    tolerance = {name: case.tolerance[name] for name in ("atol", "rtol")}
    for name, value in expected.items():
        ours = np.asarray(actual[name])
        if value.shape == (1,) and ours.shape == ():
            ours = ours[None]
        assert_close(ours, value, **tolerance, name=f"{under}{name}")
