"""The reference's samplers, replayed through the command and the public API with its own noise."""

import json

import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from pid_jax import decode, objectives
from pid_jax.config import base_config, to_json
from pid_jax.data import command
from pid_jax.errors import UserError
from pid_jax.images import to_uint8
from pid_jax.inference import PixelDecoder
from pid_jax.loading import Checkpoint
from pid_jax.parallel.mesh import single_device
from tests.golden.cases import collect
from tests.golden.layout import to_nchw, to_nhwc
from tests.golden.networks import load_network
from tests.golden.pid_flow import tolerance_of_run
from tests.tools import forge
from tools.convert_torch_weights.convert import Request, convert


def case_of(group: str):
    return next(case for case in collect() if case.family == "pid" and case.name.startswith(group))


def config_of(case, objective: str, run: dict) -> ConfigDict:
    """The config of a case's tiny network: 16-channel latents with cells of 4 pixels."""
    config = base_config()
    config.objective = objective
    config.model = ConfigDict({"name": "pidnet", **case.meta["config"]})
    config.codec = ConfigDict({"name": "dct", "block": 4})
    config.text = ConfigDict({"name": "hashed", "width": 24, "length": 6})
    config.distill.discriminator.feature_indices = (0, 1)
    config.flow.prediction_type = run["prediction_type"]
    return config


def test_the_command_draws_the_reference_student(tmp_path):
    case = case_of("C04")
    run = next(run for run in case.meta["runs"] if run["n_eps"] == 3)
    inputs, config = case.inputs, config_of(case, "pid_student", run)
    config.distill.times, config.distill.sampler = tuple(run["t_list"]), run["sample_type"]
    config.sample.steps = run["num_steps"]
    (tmp_path / "config.json").write_text(to_json(config))
    forge.save(tmp_path / "w.pth", {f"net.{k}": v for k, v in case.params().items()})
    convert(Request(str(tmp_path / "w.pth"), tmp_path / "made", dtype="float32",
                    config=str(tmp_path / "config.json")))
    fresh = [to_nhwc(inputs[f"{run['key']}/eps{i}"]) for i in range(run["n_eps"])]
    np.savez(tmp_path / "x.npz", LQ_latent=inputs["lq_latent"], noise=to_nhwc(inputs["z"]),
             degrade_sigma=inputs["degrade_sigma"], step_noise=np.stack(fresh),
             caption_embs=inputs["text_cond"], caption=["one", "two"])
    assert command.run(decode.main, [
        "--checkpoint", str(tmp_path / "made"), "--latents", str(tmp_path / "x.npz"), "--out",
        str(tmp_path / "out"), "--batch_size", "2"]) == 0
    expected = to_uint8(to_nhwc(case.outputs[f"{run['key']}/x0"]))
    for number, sigma in enumerate(inputs["degrade_sigma"]):
        path = tmp_path / "out" / f"x_{number:03d}" / f"sigma_{sigma:.3f}.png"
        drawn = np.asarray(Image.open(path))
        assert np.abs(drawn.astype(int) - expected[number]).max() <= 1
        assert json.loads(path.with_suffix(".json").read_text())["prompt"] == ("one", "two")[number]


def test_the_api_draws_what_the_reference_teacher_draws():
    case = case_of("C02")
    run = next(run for run in case.meta["runs"] if run["steps"] == 4 and run["cfg_scale"] not in
               (0, 1) and run["prediction_type"] == "velocity")
    network, inputs = load_network(case), case.inputs
    config = config_of(case, "pid_teacher", run)
    config.flow.shift = run["shift"]
    decoder = PixelDecoder(Checkpoint(None, "net", objectives.build(config), network.params,
                                      single_device()))
    drawn = decoder.decode(
        to_nhwc(inputs["lq_latent"]), inputs["text_cond"], inputs["degrade_sigma"],
        steps=run["steps"], guidance=run["cfg_scale"], negative_prompt=inputs["text_null"],
        noise=to_nhwc(inputs["z"]))
    atol = tolerance_of_run(case.tolerance["atol"], run)
    np.testing.assert_allclose(to_nchw(drawn), case.outputs[f"{run['key']}/final"], atol=atol,
                               rtol=case.tolerance["rtol"])


def test_the_student_takes_falling_times_or_refuses():
    """1 to 8 steps of the reference's table: strictly falling times, else a sentence."""
    case, config = case_of("C04"), None
    for row in case_of("C05").meta["table"]:
        if not row["num_steps"] or row["student_sample_steps"] == 1:
            continue
        config = config_of(case, "pid_student", {"prediction_type": "velocity"})
        config.distill.steps = row["student_sample_steps"]
        config.distill.times = tuple(row["student_t_list"] or ())
        student = objectives.build(config)
        falls = bool(np.all(np.diff(row["result"]) < 0))
        if falls or row["num_steps"] == 1:
            times = student.solver_table(16, 24, row["num_steps"]).times
            assert np.all(np.diff(times) < 0) and len(times) == row["num_steps"]
            if row["num_steps"] > 1:
                np.testing.assert_allclose(times, row["result"][:-1], atol=1e-7)
        else:
            with pytest.raises(UserError, match="choose 1 to 4 steps"):
                student.solver_table(16, 24, row["num_steps"])
    assert config is not None
