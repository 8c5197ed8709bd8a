"""Training the PiD teacher on every codec: the whole step traces; with one it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import quickstart_pid
from pid_jax import encoders, objectives, train
from pid_jax.errors import UserError
from pid_jax.parallel.mesh import single_device
from tests import tiny

FAMILIES = [name for name in encoders.CODECS if name != "dct"]


def config_of(family: str, data="") -> ConfigDict:
    """The tiny run with a tiny codec of random weights."""
    config = tiny.config("pid_teacher", data)
    config.codec = ConfigDict({"name": family, "weights": "random"})
    codec = encoders.build_codec(**config.codec)
    config.model.lq_latent_channels = codec.channels
    config.model.latent_spatial_down_factor = codec.spatial_factor
    return config


def side_of(objective) -> int:
    """A picture's side that the codec takes."""
    cells = getattr(objective.codec, "grid", 2)
    return cells * objective.codec.spatial_factor * objective.net.sr_scale


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_traces(family):
    """Shapes of codec, network and losses fit; nothing is computed."""
    objective = objectives.build(config_of(family))
    side = side_of(objective)

    def loss(codec, params, batch):
        bound = objective.with_codec_params(codec)
        return bound.loss(params, bound.examples(batch, jax.random.key(0)))[0]

    found = jax.eval_shape(loss, objective.codec_shapes(), objective.abstract_params,
                           objective.batch_shapes(2, side, side))
    assert found.shape == ()


def test_the_program_of_a_step_holds_no_weights():
    """Lowering reads none, and the program's text is too short to hold any."""
    objective = objectives.build(config_of("flux"))
    objective.codec._read = lambda: pytest.fail("weights were read")
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        jax.eval_shape(objective.init, jax.random.key(0)))
    step = train.compile_step(objective, single_device(), state, objective.phase(0))
    side = side_of(objective)
    assert len(step.lower(state, objective.batch_shapes(2, side, side)).as_text()) < 3e6


def test_a_run_with_random_weights(tmp_path):
    config = config_of("flux", tiny.write_dataset(tmp_path / "data"))
    config.total_steps, config.data.batch_size = 1, 2
    state = train.run(config, str(tmp_path / "run"))
    assert int(state.step) == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_quick_start_runs(tmp_path, family):
    """With samples: the codec encodes pictures of training and held-out ones."""
    config = quickstart_pid.get_config(family)
    config.data.path = str(tiny.write_dataset(tmp_path / "data", size=256))
    config.sample.heldout = config.data.path
    config.total_steps = config.sample.every = 2
    state = train.run(config, str(tmp_path / "run"))
    assert int(state.step) == 2 and list((tmp_path / "run" / "samples").glob("*.png"))


def test_missing_weights_end_the_run_before_it_reads_data(tmp_path, monkeypatch):
    monkeypatch.setenv("PID_JAX_WEIGHTS", str(tmp_path))
    config = config_of("flux", tmp_path / "no such data")
    config.codec = ConfigDict({"name": "flux", "weights": ""})
    with pytest.raises(UserError, match="encoder.json is missing"):
        train.run(config, str(tmp_path / "run"))


def test_bound_weights_are_the_ones_used():
    objective = objectives.build(config_of("sdxl"))
    images = np.zeros((1, 16, 16, 3), np.float32)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, objective.codec.params)
    bound = objective.with_codec_params(doubled)
    assert objective.codec.params is not bound.codec.params
    assert not jnp.allclose(bound.codec.encode(images), objective.codec.encode(images))


def test_pictures_that_the_codec_does_not_take_are_refused_before_anything_compiles():
    with pytest.raises(UserError, match="siglip codec encodes pictures"):
        objectives.build(config_of("siglip")).check_picture(128, 128)
