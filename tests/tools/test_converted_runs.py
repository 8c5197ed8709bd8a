"""Training starts from converted weights: same network, text-to-image under PiD, other meshes."""

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from pid_jax import objectives
from pid_jax.config import to_json
from pid_jax.errors import UserError
from pid_jax.inference import load_checkpoint
from pid_jax.objectives.pid_teacher import PidTeacher
from pid_jax.objectives.pixeldit_t2i import PixelDitT2I
from pid_jax.parallel.mesh import make_mesh
from pid_jax.parallel.sharding import state_shardings
from pid_jax.training import checkpoint, restore
from tests import tiny
from tests.tools import forge
from tools.convert_torch_weights.convert import Request, convert
from tools.convert_torch_weights.mappings import jax_to_torch, table_for
from tools.convert_torch_weights.settings import model_options


def converted(tmp_path, config: ConfigDict, dtype: str | None = None) -> dict[str, np.ndarray]:
    """Random weights for the config's network, converted to `tmp_path/converted`."""
    rng = np.random.default_rng(0)
    weights = {key: np.asarray(rng.standard_normal(shape, np.float32))
               for key, shape in table_for(*model_options(config)).shapes().items()}
    src = forge.save(tmp_path / "src.pth", weights)
    (tmp_path / "config.json").write_text(to_json(config))
    convert(Request(str(src), tmp_path / "converted", config=str(tmp_path / "config.json"),
                    dtype=dtype))
    return weights


def started(tmp_path, config: ConfigDict) -> dict[str, np.ndarray]:
    """The parameters with which a run of this config starts, under PyTorch's names."""
    config.init_from = str(tmp_path / "converted")
    objective = objectives.build(config)
    mesh = make_mesh(config.mesh, config.data.batch_size, config.optim.accumulate)
    shapes = objective.abstract_params
    abstract = checkpoint.with_shardings(shapes, state_shardings(shapes, mesh))
    params = jax.device_get(restore.initial_weights(config, objective, abstract))
    return jax_to_torch(table_for(*model_options(config)), params)


@pytest.mark.parametrize("objective", ["pixeldit_t2i", "pid_teacher"])
def test_the_same_network(tmp_path, objective):
    config = tiny.config(objective, tmp_path)
    weights = converted(tmp_path, config)
    for key, value in started(tmp_path, config).items():
        np.testing.assert_array_equal(value, weights[key], err_msg=key)


def test_bfloat16_weights_start_a_float32_run(tmp_path):
    config = tiny.config("pixeldit_t2i", tmp_path)
    weights = converted(tmp_path, config, "bfloat16")
    for key, value in started(tmp_path, config).items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, weights[key], rtol=2**-8, err_msg=key)


def test_text_to_image_weights_start_a_teacher(tmp_path):
    weights = converted(tmp_path, tiny.config("pixeldit_t2i", tmp_path))
    found = started(tmp_path, tiny.config("pid_teacher", tmp_path))
    for key, value in weights.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    assert any(key.startswith("lq_proj.") for key in found)


def test_what_shapes_do_not_tell_is_said(tmp_path, caplog):
    converted(tmp_path, tiny.config("pixeldit_t2i", tmp_path))
    config = tiny.config("pixeldit_t2i", tmp_path)
    started(tmp_path, config)
    assert "made with another config" not in caplog.text
    config.model.rope_ref_h = 64
    started(tmp_path, config)
    assert "config.init_from was made with another config: config.model.rope_ref_h" in caplog.text


@pytest.mark.parametrize("which", ["ema", "net"])
def test_the_decode_command_takes_them(tmp_path, which):
    config = tiny.config("pid_teacher", tmp_path)
    weights = converted(tmp_path, config)
    loaded = load_checkpoint(tmp_path / "converted", which, PidTeacher)
    found = jax_to_torch(table_for(*model_options(config)), jax.device_get(loaded.params))
    for key, value in weights.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    with pytest.raises(UserError, match="of the objective 'pid_teacher'"):
        load_checkpoint(tmp_path / "converted", which, PixelDitT2I)


def test_another_network_is_refused(tmp_path):
    converted(tmp_path, tiny.config("pid_teacher", tmp_path))
    with pytest.raises(UserError, match="holds another model"):
        started(tmp_path, tiny.config("pixeldit_t2i", tmp_path))
