"""Weights under the config of another network: it is said what they are and what fits."""

from pathlib import Path

import numpy as np
import pytest

from pid_jax.errors import UserError
from tests.tools.test_recognise import FAMILY, MODELS, NETWORKS, shapes_of
from tools.convert_torch_weights.matching import Exceptions, match
from tools.convert_torch_weights.readers import LazyTensor
from tools.convert_torch_weights.recognise import recognise, title
from tools.convert_torch_weights.settings import (
    config_of_model, fitting_configs, refuse_family, table_of)

FULL_SIZE = [name for name in NETWORKS if NETWORKS[name]["net"] != "Discriminator_ImageDiT"]


def config_of(name: str, **changes):
    family = FAMILY.search(name)
    codec = {"codec.name": family[0]} if family else {}
    model = MODELS[NETWORKS[name]["net"]]
    return config_of_model(name, model, shapes_of(NETWORKS[name]), codec | changes)


@pytest.fixture(scope="module")
def tables():
    return {name: table_of(config_of(name)) for name in FULL_SIZE}


@pytest.mark.parametrize("name", FULL_SIZE)
def test_every_other_network_is_refused(tables, name):
    shapes = shapes_of(NETWORKS[name])
    tensors = {key: LazyTensor(key, np.dtype(np.float32), shape, None)
               for key, shape in shapes.items()}
    hint = fitting_configs(recognise(shapes), shapes)
    assert "configs that fit: configs/" in hint or "try --model pidnet" in hint
    for other, table in tables.items():
        if table.shapes() == shapes:
            match(Path("x.pth"), table, tensors, Exceptions())
            continue
        with pytest.raises(UserError) as caught:
            match(Path("x.pth"), table, tensors, Exceptions(), lambda: hint)
        message, ours = str(caught.value), title(recognise(shapes), shapes)
        theirs = title(recognise(table.shapes()), table.shapes())
        assert message.startswith("x.pth: ") and ours in message and theirs in message, other
        assert hint in message or (ours == theirs and "aux-head" in message), other


@pytest.mark.parametrize("name, family, words", [
    ("2k_flux2", "flux", "PiD v1 for flux2 latents (128 .* but the config's latents are flux "),
    ("2kto4k_v1pt5_flux", "sd3", "PiD v1.5 for flux or qwenimage .* latents are sd3 "),
])
def test_the_codec_of_another_family(name, family, words):
    shapes = shapes_of(NETWORKS[name])
    config = config_of(name, **{"codec.name": family})
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        refuse_family("x.pth", config, shapes)
    refuse_family("x.pth", config_of(name), shapes)
    refuse_family("x.pth", config_of(name, **{"codec.name": "dct"}), shapes)
