"""Names, shapes and counts of the released PixelDiT networks, against the recorded lists."""

import gzip
import json
import math
from collections import Counter

import pytest

from tests.golden.cases import COMMITTED
from tools.convert_torch_weights.layout import split_name
from tools.convert_torch_weights.mappings import table_for
from tools.convert_torch_weights.recognise import recognise

with gzip.open(COMMITTED / "pixeldit" / "full_size_keys.json.gz") as file:
    NETWORKS = json.load(file)
CLASS_CONDITIONAL = [name for name in NETWORKS if name.startswith("c2i")]


def shapes_of(keys):
    return {key: tuple(shape) for key, shape in keys.items()}


@pytest.mark.parametrize("name", CLASS_CONDITIONAL)
def test_tables_of_the_class_conditional_sizes(name):
    network = NETWORKS[name]
    shapes = table_for("pixeldit_c2i", network["config"]).shapes()
    assert shapes == shapes_of(network["keys"])
    assert sum(map(math.prod, shapes.values())) == network["params"]


@pytest.mark.parametrize("name", CLASS_CONDITIONAL)
def test_options_are_told_from_the_shapes(name):
    network = NETWORKS[name]
    found = recognise(shapes_of(network["keys"]))
    assert found.model == "pixeldit_c2i"
    wanted = {key: value for key, value in network["config"].items() if key != "in_channels"}
    assert dict(found.options) == wanted


def test_the_lightning_file_splits_into_its_parts():
    keys = list(NETWORKS["c2i_xl"]["lightning_keys"])
    names = [split_name(f"state_dict.{key}") for key in keys]
    assert Counter(part for part, _, _ in names) == {"net": 392, "ema": 392, "projector": 6}
    network = {name for part, _, name in names if part == "ema"}
    assert network == NETWORKS["c2i_xl"]["keys"].keys()


def test_the_text_to_image_network_with_its_projector():
    network = NETWORKS["t2i_1300m"]
    known = {key: value for key, value in network["config"].items()
             if key not in ("proj_dim", "enc_dim")}
    table = table_for("pixeldit_t2i", known | {"repa_features": 768, "repa_width": 2048})
    theirs = {key.removeprefix("core.").replace("_repa_projector.", "repa_projector."): tuple(shape)
              for key, shape in network["keys"].items()}
    assert table.shapes() == theirs
    assert sum(map(math.prod, theirs.values())) == network["params_total"]
