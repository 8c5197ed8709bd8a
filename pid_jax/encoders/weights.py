"""Weights of the frozen encoders: a folder that the user has made of a download, never a download.

A folder holds `encoder.json` (which encoder, the options of its networks, where it comes from) and
`weights.safetensors` (parameters by path); `python -m tools.convert_torch_weights encoder` makes
it. Where a config names no folder, the one called like the encoder is taken from `weights/`, or
from the folder that the variable PID_JAX_WEIGHTS names.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import ml_dtypes
import numpy as np
import safetensors
from flax import traverse_util

from pid_jax.errors import UserError
from pid_jax.models import init_parameters
from pid_jax.models.layers import Params

CARD = "encoder.json"
TENSORS = "weights.safetensors"
ROOT_VARIABLE = "PID_JAX_WEIGHTS"
ROOT = "weights"
RANDOM = "random"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
          "U8": np.uint8}
FORMAT = 1

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where an encoder's weights come from.

    Attributes:
      section: of the config that names them.
      flags: of the converter, with the published files.
      place: where these are published.
      what: the encoder in words.
    """

    section: str
    flags: str
    place: str
    what: str


ORIGINS = {
    "flux": Origin("codec", "--src ae.safetensors", "black-forest-labs/FLUX.1-dev",
                   "16-channel flux latents"),
    "sd3": Origin("codec", "--src vae/diffusion_pytorch_model.safetensors",
                  "stabilityai/stable-diffusion-3-medium-diffusers", "16-channel sd3 latents"),
    "sdxl": Origin("codec", "--src sdxl_vae.safetensors", "stabilityai/sdxl-vae",
                   "4-channel sdxl latents"),
    "flux2": Origin("codec", "--src flux2_ae.safetensors", "black-forest-labs/FLUX.2-dev",
                    "128-channel flux2 latents"),
    "gemma2": Origin("text", "--src FOLDER", "google/gemma-2-2b-it", "the Gemma-2 text encoder"),
    "qwenimage": Origin("codec", "--src vae/diffusion_pytorch_model.safetensors",
                        "Qwen/Qwen-Image", "16-channel qwenimage latents"),
    "dinov2": Origin("codec", "--src model.safetensors --decoder model.pt --stats stat.pt",
                     "facebook/dinov2-with-registers-base and RAE (decoders/dinov2/wReg_base/"
                     "ViTXL_n08_i512/model.pt, stat.pt)",
                     "768-channel dinov2 latents"),
    "siglip": Origin("codec", "--src model.safetensors --decoder DECODER.pt --decoder_config "
                     "XL_decoder_config.json", "google/siglip2-so400m-patch14-224 and Scale-RAE "
                     "(siglip2_sop14_i224_web73M_ganw3_decXL.pt, XL_decoder_config.json)",
                     "1152-channel siglip latents"),
}


@dataclasses.dataclass(frozen=True)
class Opened:
    """An encoder's folder, its header read.

    Attributes:
      folder: where it is, or would be.
      options: of its networks, as the header says; empty where the folder is not there yet.
      read: gives the parameters, checked against networks of those options.
    """

    folder: Path
    options: Mapping[str, Any]
    read: Callable[[Params], Params]

    def make(self, networks: Callable[..., T]) -> T:
        """`networks(**options)`; UserError where the header has options that make no networks."""
        try:
            made = networks(**self.options)
            for network in made if isinstance(made, tuple) else (made,):
                shapes_of(network)
        except (UserError, TypeError, AttributeError, ValueError, ArithmeticError,
                IndexError) as error:
            raise UserError(f"{self.folder / CARD} is not understood ({error}); make the folder "
                            "again") from error
        return made


def open_weights(name: str, weights: str) -> Opened:
    """Opens the folder of the encoder `name`; its numbers stay on disk.

    Args:
      weights: the folder; "": the one of the convention. One that is not there is an error only
        when its numbers are needed, so that a program can do without them.
    Raises:
      UserError: the folder holds another encoder, or is damaged.
    """
    folder = folder_of(name, weights)
    options = read_card(name, folder)["network"] if (folder / CARD).exists() else {}
    return Opened(folder, options, functools.partial(read_params, name, folder))


def folder_of(name: str, weights: str) -> Path:
    """Where the weights of the encoder `name` are looked for."""
    return Path(weights or Path(os.environ.get(ROOT_VARIABLE, ROOT)) / name)


def read_card(name: str, folder: Path) -> dict[str, Any]:
    """The header of an encoder's folder; UserError when it is not that of the encoder `name`."""
    card = _read_json(name, folder)
    if card.get("format") != FORMAT or not isinstance(card.get("network"), dict):
        raise UserError(f"{folder / CARD} is not the header of an encoder; {_advice(name, folder)}")
    if card.get("encoder") != name:
        section, held = ORIGINS[name].section, card.get("encoder")
        raise UserError(f"config.{section}.name asks for {ORIGINS[name].what}, but {folder} holds "
                        f"{ORIGINS[held].what if held in list(ORIGINS) else repr(held)}; name the "
                        f"folder of the right ones as config.{section}.weights")
    return card | {"network": _tuples(card["network"])}


def _read_json(name: str, folder: Path) -> dict[str, Any]:
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise missing(name, folder, CARD) from error
    except NotADirectoryError as error:
        raise UserError(f"{folder} is a file; make a folder of it: {_advice(name, folder)}"
                        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder / CARD} cannot be read: {error}") from error
    return card if isinstance(card, dict) else {}


class MissingWeights(UserError):
    """An encoder is asked to work whose weights are not there."""


def missing(name: str, folder: Path, file: str) -> MissingWeights:
    """The error for a file that an encoder needs and that is not there."""
    return MissingWeights(f"the encoder {name!r} ({ORIGINS[name].what}) needs its weights, but "
                          f"{folder / file} is missing; {_advice(name, folder)}")


def _advice(name: str, folder: Path) -> str:
    origin = ORIGINS[name]
    return (f"get the files from {origin.place} and run `python -m tools.convert_torch_weights "
            f"encoder --name {name} {origin.flags} --dst {folder}`, or name a folder that has "
            f"them as config.{origin.section}.weights")


def read_params(name: str, folder: Path, expected: Params) -> Params:
    """The parameters, mapped from the disk.

    Args:
      expected: their shapes, as nested dicts.
    Raises:
      UserError: a file is missing or damaged, or holds other parameters.
    """
    read_card(name, folder)
    path = folder / TENSORS
    try:
        leaves = read_tensors(path)
    except FileNotFoundError as error:
        raise missing(name, folder, TENSORS) from error
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}; make the folder again") from error
    wanted = traverse_util.flatten_dict(expected, sep="/")
    wrong = [key for key in wanted.keys() | leaves.keys()
             if key not in wanted or key not in leaves or wanted[key].shape != leaves[key].shape]
    if wrong:
        raise UserError(f"{path} does not hold the network that its {CARD} describes ("
                        f"{', '.join(sorted(wrong)[:3])}); make the folder again")
    return traverse_util.unflatten_dict(leaves, sep="/")


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .safetensors file, bfloat16 too, as read-only views of it."""
    with safetensors.safe_open(path, framework="numpy"):
        pass  # checks the whole header: places, sizes, no gaps
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", offset=8 + length)
    return {key: data[slice(*entry["data_offsets"])].view(DTYPES[entry["dtype"]])
            .reshape(entry["shape"]) for key, entry in header.items()}


def shapes_of(network: Any) -> Params:
    """Shapes of a network's parameters; nothing is computed."""
    return jax.eval_shape(lambda: init_parameters(network, jax.random.key(0)))


def random_params(shapes: Params) -> Params:
    """Values of these shapes and of sizes that keep activations near one; always the same."""
    rng = np.random.default_rng(0)

    def draw(path: str, shape: tuple[int, ...]) -> np.ndarray:
        values, kind = rng.standard_normal(shape, np.float32), path.rsplit("/", 1)[-1]
        if kind in ("scale", "var"):
            return 1 + 0.1 * np.abs(values)
        fan_in = 100 if len(shape) < 2 or kind == "bias" else math.prod(shape[:-1])
        return values / np.float32(math.sqrt(fan_in))

    leaves = traverse_util.flatten_dict(shapes, sep="/")
    return traverse_util.unflatten_dict(
        {path: draw(path, leaf.shape) for path, leaf in leaves.items()}, sep="/")


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(entry) for key, entry in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
