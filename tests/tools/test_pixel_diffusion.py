"""TiTok, JiT and DiTok in and out: round trips, computed tables, the layout of their trainings."""

import json

import jax
import numpy as np
import pytest

from pid_jax import objectives
from pid_jax.errors import UserError
from pid_jax.models import build_model, init_parameters
from pid_jax.training import checkpoint
from tests.objectives.test_ditok import DITOK, JIT, make_config
from tests.tools import forge
from tools.convert_torch_weights.convert import Request, convert
from tools.convert_torch_weights.export import export
from tools.convert_torch_weights.layout import read_layout
from tools.convert_torch_weights.mappings import table_for
from tools.convert_torch_weights.readers import open_source
from tools.convert_torch_weights.training_layout import export_training
from tools.convert_torch_weights.verify import verify


def options(model):
    return {name: value for name, value in model.items() if name != "name"}


def state_dict(model, table):
    rng = np.random.default_rng(0)
    random = {key: np.asarray(rng.standard_normal(shape, np.float32))
              for key, shape in table.shapes().items()}
    return random | {key: make() for key, make in table.constants.items()}


CHANGES = {"jit": {"in_context_start": "1"},
           "ditok": {"vit_enc_dims": "[8, 1, 2]", "use_l2_norm": "true", "is_legacy": "true"}}


@pytest.mark.parametrize("model", [JIT, DITOK], ids=["jit", "ditok"])
def test_round_trip(model, tmp_path):
    name = model["name"]
    tensors = state_dict(model, table_for(name, options(model)))
    source = forge.save(tmp_path / "source.pth", {f"net.{k}": v for k, v in tensors.items()})
    convert(Request(str(source), tmp_path / "ours", model=name, changes=CHANGES[name]))
    assert verify(str(source), tmp_path / "ours") > 0
    export(tmp_path / "ours", tmp_path / "back.safetensors")
    back = open_source(str(tmp_path / "back.safetensors")).tensors
    assert back.keys() == tensors.keys()
    for key, value in tensors.items():
        np.testing.assert_array_equal(back[key].read(), value, err_msg=key)


def test_another_position_table_is_refused(tmp_path):
    tensors = state_dict(JIT, table_for("jit", options(JIT)))
    tensors["pos_embed"] = tensors["pos_embed"] + 0.1
    source = forge.save(tmp_path / "source.safetensors", tensors)
    with pytest.raises(UserError, match="pos_embed is not the fixed table"):
        convert(Request(str(source), tmp_path / "ours", model="jit", changes=CHANGES["jit"]))


def test_a_missing_frozen_key_is_refused(tmp_path):
    tensors = state_dict(DITOK, table_for("ditok", options(DITOK)))
    del tensors["latent_tokens"]
    source = forge.save(tmp_path / "source.safetensors", tensors)
    with pytest.raises(UserError, match="latent_tokens"):
        convert(Request(str(source), tmp_path / "ours", model="ditok",
                        changes=CHANGES["ditok"] | {"num_latent_tokens": "4"}))


@pytest.fixture
def trained(tmp_path):
    """A checkpoint of step 7 whose averages differ from its parameters."""
    config = make_config()
    objective = objectives.build(config)
    state = objective.init(jax.random.key(0))
    averages = {name: jax.tree.map(lambda leaf: leaf + number, tree)
                for number, (name, tree) in enumerate(state.ema.items(), 1)}
    saver = checkpoint.Checkpointer(tmp_path / "run", 1)
    saver.save(state.replace(step=state.step + 7, ema=averages), {}, config)
    saver.close()
    return tmp_path / "run", state.params


def test_the_layout_of_the_trainings(trained, tmp_path):
    folder, params = trained
    paths = export_training(folder, tmp_path / "out")
    assert [path.name for path in paths] == ["checkpoint-7.pt", "ema-7.pt"]
    whole = open_source(str(paths[0]))
    assert "global_step" in whole.other
    table = table_for("ditok", options(DITOK))
    held = read_layout(whole).parts["net"]
    assert held.keys() == table.shapes().keys() | table.constants.keys()
    embed = params["diffusion_decoder"]["decoder_embed"]["bias"]
    key = "diffusion_decoder.decoder_embed.bias"
    np.testing.assert_array_equal(held[key].read(), embed)
    averages = open_source(str(paths[1]))
    assert {"ema_decay1", "ema_decay2", "global_step"} <= averages.other.keys()
    parts = read_layout(averages).parts
    assert all(name.startswith("diffusion_decoder.") for part in parts.values() for name in part)
    for number, part in enumerate(("ema", "ema2"), 1):
        np.testing.assert_allclose(parts[part][key].read(), embed + number, rtol=1e-6)
    with pytest.raises(UserError, match="exists"):
        export_training(folder, tmp_path / "out")


def test_an_average_is_exported_with_what_does_not_train(trained, tmp_path):
    folder, params = trained
    for which, number in ((None, 1), ("ema2", 2), ("params", 0)):
        file = tmp_path / f"{which}.safetensors"
        export(folder, file, which=which)
        held = open_source(str(file)).tensors
        embed = params["diffusion_decoder"]["decoder_embed"]["bias"]
        np.testing.assert_allclose(held["diffusion_decoder.decoder_embed.bias"].read(),
                                   embed + number, rtol=1e-6)
        np.testing.assert_array_equal(held["latent_tokens"].read(), params["latent_tokens"])


def test_a_titok_converts_by_what_it_holds(tmp_path):
    given = {"codebook_size": 32, "token_size": 3, "vit_enc_dims": (8, 1, 2),
             "vit_enc_patch_size": 8, "num_latent_tokens": 4, "crop_size": 16,
             "with_decoder": False}
    tensors = state_dict({}, table_for("titok", given))
    source = forge.save(tmp_path / "titok.pth", {f"model.{k}": v for k, v in tensors.items()})
    card = convert(Request(str(source), tmp_path / "ours", model="titok", changes={
        "vit_enc_dims": "[8, 1, 2]", "use_l2_norm": "true", "is_legacy": "true"}))
    shapes = jax.eval_shape(lambda: init_parameters(build_model("titok", **given),
                                                    jax.random.key(0)))
    assert card["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    config = json.loads((tmp_path / "ours/checkpoints/0/config/metadata").read_text())
    assert config["model"]["with_decoder"] is False
