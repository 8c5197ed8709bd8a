"""Configs for converted weights: from files, and from what full-size weights tell."""

import pytest

from pid_jax.config import check_config
from pid_jax.errors import UserError
from tests.tools.test_recognise import FAMILY, MODELS, NETWORKS, shapes_of
from tools.convert_torch_weights.recognise import recognise
from tools.convert_torch_weights.settings import (
    config_of_file, config_of_model, fitting_configs, table_of)

PID = [name for name in NETWORKS if NETWORKS[name]["net"] == "PidNet"]


@pytest.mark.parametrize("name", PID)
def test_a_released_network_needs_no_config(name):
    entry = NETWORKS[name]
    shapes = shapes_of(entry)
    config = config_of_model("x.pth", "pidnet", shapes, {"codec.name": FAMILY.search(name)[0]})
    for option, value in entry["config"].items():
        if option in config.model:
            assert config.model[option] == value, option
    assert table_of(config).shapes() == shapes
    check_config(config)


def test_text_to_image():
    name = next(n for n in NETWORKS if NETWORKS[n]["net"] == "PixDiT_T2I")
    config = config_of_model("x.pth", "pixeldit_t2i", shapes_of(NETWORKS[name]), {})
    assert config.model.rope_mode == "original" and config.text.name == "gemma2"
    assert table_of(config).shapes() == shapes_of(NETWORKS[name])


def test_families_that_share_a_structure_must_be_named():
    shapes = shapes_of(NETWORKS["2k_flux"])
    with pytest.raises(UserError, match="latents of flux and of sd3.*codec.name"):
        config_of_model("x.pth", "pidnet", shapes, {})


def test_what_shapes_do_not_tell_is_asked_for():
    shapes = {"lq_proj.output_heads.0.weight": (8, 4),
              "lq_proj.latent_proj.0.weight": (4, 16, 3, 3)}
    with pytest.raises(UserError, match="model.sr_scale.*codec.name.*--config"):
        config_of_model("x.pth", "pidnet", shapes, {})


def test_weights_of_another_network_are_named():
    with pytest.raises(UserError, match="x.pth: the weights are PiD v1 for flux or sd3 latents"):
        config_of_model("x.pth", "pixeldit_t2i", shapes_of(NETWORKS["2k_flux"]), {})


@pytest.mark.parametrize("name, fits", [
    ("2kto4k_v1pt5_flux", "configs/pid_teacher_flux_2k.py"),
    ("pixeldit_h1536_d14p2", "configs/pixeldit_t2i_2k.py"),
    ("2k_flux", "configs/pid_v1_flux_2k.py")])
def test_configs_that_fit(name, fits):
    shapes = shapes_of(NETWORKS[name])
    assert fits in fitting_configs(recognise(shapes), shapes)
    assert recognise(shapes).model == MODELS[NETWORKS[name]["net"]]


def test_changes_and_their_errors(tmp_path):
    path = "configs/pid_teacher_flux_2k.py:offline"
    config = config_of_file(path, {
        "sr_scale": "8", "optim.lr": "0.5", "model.rope_mode": "original", "codec.name": "sd3",
        "pit_lq_inject": "False"})
    assert (config.model.sr_scale, config.optim.lr, config.codec.name) == (8, 0.5, "sd3")
    assert config.model.pit_lq_inject is False and config.model.rope_mode == "original"
    with pytest.raises(UserError, match="no section 'opt'"):
        config_of_file(path, {"opt.lr": "1"})
    with pytest.raises(UserError, match="absent.py cannot be loaded"):
        config_of_file(str(tmp_path / "absent.py"), {})
    with pytest.raises(UserError, match="absent.json cannot be read"):
        config_of_file(str(tmp_path / "absent.json"), {})
