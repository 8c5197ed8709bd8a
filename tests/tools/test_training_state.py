"""A forged Lightning checkpoint becomes a state that training goes on from."""

import numpy as np
import pytest
from ml_collections import ConfigDict

from pid_jax import train
from pid_jax.config import to_json
from pid_jax.errors import UserError
from pid_jax.inference import load_checkpoint
from pid_jax.objectives.pixeldit_c2i import PixelDitC2I
from tests import tiny
from tests.tools import forge
from tools.convert_torch_weights.convert import Request, convert
from tools.convert_torch_weights.mappings import table_for

STEP = 7


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    config = tiny.config("pixeldit_c2i", tiny.write_dataset(folder / "packed"))
    config.model = ConfigDict({**config.model.to_dict(), "repa_features": 16})
    config.repa.weight, config.repa.block, config.ema.others = 0.5, 1, ()
    config.total_steps = STEP + 1
    return config


def tensors(config):
    """Every tensor of a checkpoint of the config's network, random."""
    options = config.model.to_dict()
    shapes = table_for(options.pop("name"), options).shapes()
    rng = np.random.default_rng(0)
    draw = lambda shape: np.float32(0.1 * rng.standard_normal(shape))
    network = [key for key in shapes if not key.startswith("repa_projector.")]
    projector = [key for key in shapes if key.startswith("repa_projector.")]
    found = {f"denoiser.{key}": draw(shapes[key]) for key in network}
    found |= {f"ema_denoiser.{key}": draw(shapes[key]) for key in network}
    found |= {f"diffusion_trainer.proj.0.{key.removeprefix('repa_projector.')}": draw(shapes[key])
              for key in projector}
    for index, key in enumerate([*network, *projector]):
        state = f"optimizer_states.0.state.{index}"
        found |= {f"{state}.step": np.asarray(STEP, np.float32),
                  f"{state}.exp_avg": draw(shapes[key]),
                  f"{state}.exp_avg_sq": draw(shapes[key]) ** 2}
    return found


def test_training_goes_on_from_a_lightning_checkpoint(config, tmp_path):
    forge.save(tmp_path / "last.pth", tensors(config))
    (tmp_path / "config.json").write_text(to_json(config))
    card = convert(Request(str(tmp_path / "last.pth"), tmp_path / "converted", training_state=True,
                           config=str(tmp_path / "config.json")))
    assert card["step"] == STEP and card["averages"] == ["ema"]
    drawn = load_checkpoint(tmp_path / "converted", "ema", PixelDitC2I)
    assert drawn.params["final_layer"]["linear"]["kernel"].shape == (4, 3)
    config.resume = str(tmp_path / "converted")
    state = train.run(config, str(tmp_path / "run"))
    assert int(state.step) == STEP + 1 and int(state.opt_state.adam[0].count) == STEP + 1


def test_weights_alone_are_no_training_state(config, tmp_path):
    kept = {name: value for name, value in tensors(config).items() if "optimizer" not in name}
    forge.save(tmp_path / "weights.pth", kept)
    (tmp_path / "config.json").write_text(to_json(config))
    request = Request(str(tmp_path / "weights.pth"), tmp_path / "out", training_state=True,
                      config=str(tmp_path / "config.json"))
    with pytest.raises(UserError, match="no whole training state: it lacks optimizer_states"):
        convert(request)
    assert not (tmp_path / "out").exists()
