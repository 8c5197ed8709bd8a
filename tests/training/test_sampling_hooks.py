"""Sample grids: which are drawn, what they are called, how they are scored."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.config import base_config
from pid_jax.errors import UserError
from pid_jax.parallel.mesh import single_device
from pid_jax.training import sampling_hooks
from pid_jax.training.state import TrainState


class Objective:
    """Draws pictures whose brightness is the weight plus the guidance."""

    lq_scale, sample_size, guided = None, 16, True
    net = types.SimpleNamespace(patch_size=8)

    def __init__(self, **sample):
        self.config = base_config()
        self.config.sample.update(sample)

    def with_average(self, params, average):
        return average

    def codec_params(self, sharding):
        return {}

    def with_codec_params(self, params):
        return self

    def sample_inputs(self, heldout):
        return {"text": np.zeros((2, 1), np.float32)}

    def sample(self, params, inputs, rng, size=None, guidance=None):
        grey = params["weight"] + guidance / 100 + inputs["text"].reshape(-1, 1, 1, 1)
        return {"sample": jnp.broadcast_to(grey, (2, size, size, 3))}


def draw(tmp_path, **sample):
    state = TrainState(jnp.int32(7), {"weight": jnp.float32(0.1)}, {},
                       {"ema": {"weight": jnp.float32(0.2)}})
    sampler = sampling_hooks.Sampler(Objective(**sample), tmp_path, single_device(), {})
    sampler.write(state)
    notes = {path.stem: json.loads(path.read_text())
             for path in (tmp_path / "samples").glob("*.json")}
    assert set(notes) == {path.stem for path in (tmp_path / "samples").glob("*.png")}
    return notes


def test_missing_weights_of_lpips_are_an_error(tmp_path):
    with pytest.raises(UserError, match="lost.safetensors"):
        draw(tmp_path, lpips=str(tmp_path / "lost.safetensors"))


def test_one_grid_by_default(tmp_path):
    notes = draw(tmp_path)
    assert list(notes) == ["step_0000007"] and notes["step_0000007"]["columns"] == ["sample"]


def test_further_weights_sizes_and_guidance(tmp_path):
    notes = draw(tmp_path, more_weights=("params",), more_sizes=(32,), more_guidance=(1.0, 4.5))
    assert set(notes) == {"step_0000007", "step_0000007_params", "step_0000007_32",
                          "step_0000007_params_32"}
    assert notes["step_0000007_params"]["columns"] == ["sample", "sample_cfg1", "sample_cfg4.5"]
    assert notes["step_0000007_params_32"]["size"] == 32


def test_guidance_that_a_student_would_not_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Objective, "guided", False)
    with pytest.raises(UserError, match="more_guidance is .1.0,., but the objective .* draws "
                                        "without guidance"):
        draw(tmp_path, more_guidance=(1.0,))


def test_scores_against_truth_and_low_quality():
    rng = np.random.default_rng(0)
    truth = rng.uniform(-1, 1, (2, 16, 16, 3)).astype(np.float32)
    near = np.clip(truth + rng.normal(0, 0.1, truth.shape), -1, 1).astype(np.float32)
    scores = sampling_hooks.score({"bicubic": truth * 0, "sample": near, "truth": truth}, 4)
    assert scores["psnr_sample"] > scores["psnr_bicubic"]
    assert scores["lq_psnr_sample"] > scores["psnr_sample"]  # reducing averages the noise away
    assert {f"{kind}{metric}_sample" for kind in ("", "lq_")
            for metric in ("psnr", "ssim", "de2000")} < set(scores)
    assert sampling_hooks.score({"sample": near}) == {}
    mean = sampling_hooks.score({"sample": near, "truth": truth},
                                lpips=lambda a, b: np.abs(a - b).mean((1, 2, 3)))
    assert mean["lpips_sample"] == pytest.approx(np.abs(near - truth).mean())
    assert jax.tree.all(jax.tree.map(np.isfinite, scores))
