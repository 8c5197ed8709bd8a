"""Whole updates of both objectives under every switch of the config: finite, and the same where
the switch must not change the numbers."""

import functools

import jax
import numpy as np
import pytest

from pid_jax import objectives
from pid_jax.config import check_config
from tests import tiny

pytestmark = pytest.mark.slow

BOTH = {
    "plain": {},
    "wide": {"height": 16, "width": 48},
    "two micro-batches": {"optim.accumulate": 2},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 parameters": {"dtype": "bfloat16", "param_dtype": "bfloat16"},
    "remat full": {"model.remat": "full"},
    "remat attention": {"model.remat": "attention"},
    "x0": {"flow.prediction_type": "x0"},
    "dynamic shift": {"flow.dynamic_shift": True},
    "no average": {"ema.enabled": False},
    "another seed": {"seed": 4321},
}
TEACHER = {
    "vp noise": {"noising.path": "vp"},
    "no alignment": {"align.enabled": False},
    "clean latents": {"noising.enabled": False},
    "lq branch only": {"model.train_lq_proj_only": True},
    "ntk rotary": {"model.rope_mode": "ntk_aware"},
}
SAME_AS_PLAIN = ("remat full", "remat attention")


@functools.cache
def updated(objective: str, variant: str):
    """Loss and parameters after two updates."""
    changes = dict((BOTH | TEACHER)[variant])
    height, width = changes.pop("height", 32), changes.pop("width", 32)
    config = tiny.config(objective, "data")
    config.update_from_flattened_dict(changes)
    check_config(config)
    built = objectives.build(config)
    state = built.init(jax.random.key(config.seed))
    pixels = np.random.default_rng(config.seed).uniform(-1, 1, (4, height, width, 3))
    batch = built.prepare({"image": np.float32(pixels), "caption": ["a barn"] * 4,
                           "source": ["barns"] * 4})
    step = jax.jit(built.step)
    for _ in range(2):
        state, metrics = step(state, batch)
    return metrics, state


@pytest.mark.parametrize("objective, variant", [
    *(("pixeldit_t2i", variant) for variant in BOTH),
    *(("pid_teacher", variant) for variant in BOTH | TEACHER)])
def test_two_updates(objective, variant):
    metrics, state = updated(objective, variant)
    assert int(state.step) == 2 and not float(metrics["update_skipped"])
    for leaf in jax.tree.leaves((metrics, state)):
        assert np.all(np.isfinite(np.asarray(leaf, np.float32)))
    if variant in SAME_AS_PLAIN:
        plain, _ = updated(objective, "plain")
        assert abs(float(metrics["loss"]) - float(plain["loss"])) < 1e-5
