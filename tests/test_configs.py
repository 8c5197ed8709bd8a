"""Every config is complete, its parts fit, and its whole step traces (nothing is compiled)."""

import importlib
import pkgutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import configs
from pid_jax import objectives
from pid_jax.config import check_config
from pid_jax.data.buckets import build_layout
from pid_jax.errors import UserError
from tests import tiny

NAMES = [module.name for module in pkgutil.iter_modules(configs.__path__) if not module.ispkg]
FULL_SIZE = [name for name in NAMES if name != "digits" and not name.startswith("quickstart")]
TRAINED = [name for name in FULL_SIZE if not name.startswith("pid_v1")]


def load(name, variant=""):
    return importlib.import_module(f"configs.{name}").get_config(variant)


def trace_step(config, batch_size=2):
    """Shapes of state and metrics after one step at the config's picture size."""
    config.data.batch_size = batch_size
    objective = objectives.build(config)
    bucket = build_layout(config.data.buckets, config.data.image_size, config.data.sizes).buckets[0]
    objective.check_picture(bucket.height, bucket.width)
    batch = objective.batch_shapes(batch_size, bucket.height, bucket.width)
    state = jax.eval_shape(objective.init, jax.random.key(0))
    return state, *jax.eval_shape(objective.phases()[objective.phase(0)], state, batch)


def leaves(tree):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", NAMES)
def test_config_is_complete(name):
    config = load(name)
    check_config(config)
    command = "pid_jax.decode" if name.startswith("pid_v1") else "pid_jax.main"
    assert f"python -m {command}" in importlib.import_module(f"configs.{name}").__doc__


@pytest.mark.parametrize("name", TRAINED)
def test_full_size_parts_fit_and_the_step_traces(name):
    before, after, metrics = trace_step(load(name, "offline"))
    assert leaves(before) == leaves(after)
    assert metrics["loss"].shape == () and metrics["loss"].dtype == jnp.float32


@pytest.mark.parametrize("name", FULL_SIZE)
def test_unknown_variant_is_refused(name):
    with pytest.raises(UserError, match="no variant 'tiny'; it has 'offline' and 'debug'"):
        load(name, "tiny")


@pytest.mark.parametrize("name", FULL_SIZE)
def test_debug_runs_anywhere(name):
    config = load(name, "debug")
    check_config(config)
    objective = objectives.build(config)
    objective.check_picture(config.data.image_size, config.data.image_size)
    assert (config.total_steps, config.codec.name, config.text.name) == (25, "dct", "hashed")
    parameters = sum(leaf.size for leaf in jax.tree.leaves(objective.abstract_params))
    assert parameters < 1e7


def test_documented_options_of_encoders_can_be_set():
    """On the command line a key must be in the config; `docs/encoders.md` names these."""
    config = load("pid_teacher_flux_2k", "")
    assert {"weights", "stored", "tokenizer", "attn_softcap", "dtype"} < set(config.text)
    assert {"weights", "band", "dtype"} < set(config.codec)


def test_every_config_is_in_the_table():
    table = (Path(configs.__file__).parent / "README.md").read_text()
    assert all(f"`{name}.py`" in table for name in NAMES)


@pytest.mark.parametrize("objective, prediction, remat", [
    ("pixeldit_t2i", "velocity", "none"), ("pixeldit_t2i", "x0", "attention"),
    ("pid_teacher", "velocity", "full"), ("pid_teacher", "x0", "attention")])
def test_bfloat16_keeps_float32_state(objective, prediction, remat):
    config = tiny.config(objective, "unused")
    config.dtype, config.flow.prediction_type = "bfloat16", prediction
    config.model.remat, config.optim.accumulate = remat, 2
    before, after, metrics = trace_step(config, 4)
    assert leaves(before) == leaves(after)
    floats = {dtype for _, dtype in leaves(after) if jnp.issubdtype(dtype, jnp.floating)}
    assert floats == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in metrics.values()} == {jnp.dtype("float32")}
