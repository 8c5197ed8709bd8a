"""The network and its options are told from the shapes of golden cases, full size included."""

import gzip
import json
import re

import pytest

from tests.golden import cases
from tools.convert_torch_weights.mappings import NETWORKS as CONVERTIBLE
from tools.convert_torch_weights.recognise import recognise, version

MODELS = {"PixDiT_T2I": "pixeldit_t2i", "PidNet": "pidnet", "Discriminator_ImageDiT":
          "discriminator"}
FAMILY = re.compile(r"flux2|flux|sd3|sdxl|qwenimage|dinov2|siglip")


def full_size_networks():
    for folder in cases.golden_folders():
        if (file := folder / "H01_full_size_keys.json.gz").exists():
            yield from json.loads(gzip.decompress(file.read_bytes())).items()


def shapes_of(entry: dict) -> dict:
    return {key: tuple(shape) for key, (shape, _) in entry["keys"].items()}


NETWORKS = dict(full_size_networks())


@pytest.mark.parametrize("name", NETWORKS)
def test_full_size_networks(name):
    entry = NETWORKS[name]
    found = recognise(shapes_of(entry))
    assert found.model == MODELS[entry["net"]]
    assert len(found.reasons) == len(found.options) + 1
    for option, value in found.options.items():
        assert entry["config"].get(option) == value, option


@pytest.mark.parametrize("name", [n for n in NETWORKS if NETWORKS[n]["net"] == "PidNet"])
def test_released_pid_networks(name):
    entry = NETWORKS[name]
    shapes = shapes_of(entry)
    found = recognise(shapes)
    assert version(found, shapes) == ("v1.5" if "v1pt5" in name else "v1")
    assert FAMILY.search(name)[0] in CONVERTIBLE[found.model].families(found, shapes)
    for option, value in CONVERTIBLE[found.model].released(found, shapes).items():
        assert entry["config"][option] == value, option


@pytest.mark.parametrize("case", [c for c in cases.collect() if re.match(r"A\d", c.name)],
                         ids=lambda c: c.name)
def test_tiny_networks(case):
    found = recognise({key: value.shape for key, value in case.params().items()})
    assert found.model == MODELS[case.meta["net"]]
    for option, value in found.options.items():
        expected = case.meta["config"].get(option)
        assert expected == value or (expected is None and option.startswith("ed_")), option
    assert not CONVERTIBLE[found.model].released(found, {})


def test_an_unknown_network():
    found = recognise({"conv1.weight": (64, 3, 7, 7)})
    assert found.model is None and not found.options
