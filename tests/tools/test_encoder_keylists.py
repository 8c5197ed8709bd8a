"""The full-size encoders have exactly the tensors of the published files; nothing is allocated."""

import gzip
import json
import math
import re

import pytest

from pid_jax.encoders.autoencoder_codec import network_of
from pid_jax.encoders.gemma2 import Gemma2
from pid_jax.encoders.representation_codec import networks_of
from tests.golden.cases import COMMITTED
from tools.convert_torch_weights.encoder_sizes import (autoencoder_sizes, decoder_sizes,
                                                       gemma_options, vit_sizes)
from tools.convert_torch_weights.mappings.encoders import NAMINGS, encoder_table, naming_of

FOLDER = COMMITTED / "encoders" / "keylists"
AUTOENCODERS = {
    "flux_ae_ldm": ("flux", "ldm"), "sd3_vae_diffusers": ("sd3", "diffusers"),
    "sdxl_vae_diffusers": ("sdxl", "diffusers"), "sdxl_vae_ldm": ("sdxl", "ldm"),
    "flux2_ae_ldm": ("flux2", "ldm"), "flux2_vae_diffusers": ("flux2", "diffusers"),
    "qwenimage_vae_2d": ("qwenimage", "wan2d"),
    "qwenimage_vae_diffusers3d": ("qwenimage", "diffusers3d")}


def key_list(name: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a published file."""
    listed = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    assert len(listed["keys"]) == listed["num_tensors"]
    assert sum(map(math.prod, listed["keys"].values())) == listed["num_values"]
    return {key: tuple(shape) for key, shape in listed["keys"].items()}


def check_keys(listed: dict[str, tuple[int, ...]], table, naming: str) -> None:
    """Both ways: every listed tensor is ours or known as unused, and we have no other."""
    unused = re.compile(NAMINGS[naming].unused)
    assert table.shapes() == {key: shape for key, shape in listed.items()
                              if not unused.fullmatch(key)}


@pytest.mark.parametrize("name", AUTOENCODERS)
def test_autoencoders(name):
    family, naming = AUTOENCODERS[name]
    listed = key_list(name)
    network = network_of(family)
    assert naming_of(listed) == naming
    assert network_of(family, **autoencoder_sizes(naming, listed)) == network
    check_keys(listed, encoder_table(network, naming), naming)


def test_gemma():
    listed = {key.removeprefix("model."): shape for key, shape in key_list("gemma2_2b_it").items()}
    network = Gemma2()
    assert naming_of(listed) == "gemma2"
    assert Gemma2(**gemma_options(listed, FOLDER)) == network
    check_keys(listed, encoder_table(network, "gemma2"), "gemma2")


def test_vision_transformers():
    encoders = {"dinov2_with_registers_base": "dinov2", "siglip2_so400m_p14_224_vision": "siglip"}
    decoders = {"rae_vitxl_decoder": "dinov2", "scale_rae_vitxl_decoder": "siglip"}
    for name, codec in encoders.items():
        listed = key_list(name)
        network = networks_of(codec, vit_sizes(codec, listed), {})[0]
        assert network == networks_of(codec, {}, {})[0] and naming_of(listed) == codec
        check_keys(listed, encoder_table(network, codec), codec)
    for name, codec in decoders.items():
        listed = key_list(name)
        network = networks_of(codec, {}, decoder_sizes(listed))[1]
        assert network == networks_of(codec, {}, {})[1] and naming_of(listed) == "mae_decoder"
        check_keys(listed, encoder_table(network, "mae_decoder"), "mae_decoder")
