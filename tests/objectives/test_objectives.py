"""The objectives: losses, degradation and updates against what they are written to be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs.common import networks
from pid_jax import objectives
from pid_jax.config import base_config
from pid_jax.diffusion import schedules
from pid_jax.errors import UserError
from pid_jax.objectives.pid_teacher import PidTeacher
from pid_jax.objectives.pixeldit_t2i import PixelDitT2I
from tests import tiny
from tests.objectives.stubs import Codec, LinearNet, Net, Text


def random(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


class TextToImage(PixelDitT2I):
    def frozen_rules(self):
        return ()


class Teacher(PidTeacher):
    def frozen_rules(self):
        return ()


def text_to_image(answer, **flow):
    config = base_config()
    config.flow.update(flow)
    return TextToImage(config, Net(answer), Text())


def teacher(answer=None, **sections):
    config = base_config()
    config.noising.enabled = config.align.enabled = True
    for name, values in sections.items():
        config[name].update(values)
    return Teacher(config, Net(answer or (lambda x, t, y, **_: x)), Text(), Codec())


def teacher_batch(size=4):
    return {"image": random(size, 16, 24, 3), "text": random(size, 3, 2, seed=1),
            "sigma_range": np.tile(np.float32([0.2, 0.6]), (size, 1))}


# Text to image


def test_perfect_answers_have_no_loss():
    batch = {"image": random(2, 8, 8, 3), "text": random(2, 3, 2, seed=1)}
    examples = text_to_image(None).examples(batch, jax.random.key(1))
    velocity = examples["noise"] - examples["image"]
    for kind, answer in (("velocity", velocity), ("x0", examples["image"])):
        objective = text_to_image(lambda *_, answer=answer: answer, prediction_type=kind)
        params = objective.init(jax.random.key(0)).params
        loss, metrics = objective.loss(params, examples)
        assert abs(float(loss)) < 1e-9 and metrics["loss"] == loss


def test_network_reads_times_in_thousands():
    objective = text_to_image(lambda x, *_: x)
    batch = {"image": random(2, 8, 8, 3), "text": random(2, 3, 2)}
    examples = objective.examples(batch, jax.random.key(1))
    objective.loss(objective.init(jax.random.key(0)).params, examples)
    np.testing.assert_allclose(objective.net.calls[-1]["t"], 1000 * examples["t"], rtol=1e-6)


def test_draws_depend_on_seed_and_step_only():
    objective = text_to_image(None)
    batch = {"image": random(2, 8, 8, 3)}
    first, again = (objective.examples(batch, jax.random.key(3)) for _ in range(2))
    np.testing.assert_array_equal(first["noise"], again["noise"])
    other = objective.examples(batch, jax.random.key(4))
    assert not np.array_equal(first["noise"], other["noise"])


def test_shift_is_fixed_or_grows_with_the_picture():
    assert text_to_image(None, shift=3.0).shift(64, 64) == 3.0
    dynamic = text_to_image(None, dynamic_shift=True, dynamic_base_shift=4.0,
                            dynamic_image_size=64)
    assert dynamic.shift(64, 64) == 4.0
    assert dynamic.shift(128, 512) == pytest.approx(8.0)


def test_times_are_shifted_logit_normal():
    objective = text_to_image(None, shift=6.0)
    times = np.sort(objective.draw_times(jax.random.key(0), 4001, 8, 8))
    assert times[2000] == pytest.approx(6 * 0.5 / (1 + 5 * 0.5), abs=0.02)  # the median


def test_guided_sample_uses_both_prompts():
    def answer(x, t, y):
        return y[:, :1, :1, None] + 0 * x  # the velocity is the caption's length

    objective = text_to_image(answer)
    table = objective.solver_table(8, 8, 4)
    noise = jnp.zeros((1, 8, 8, 3))
    text, null = (np.full((1, 3, 2), value, np.float32) for value in (0.2, 0.1))
    pictures = objective.draw({"lq_proj": {"kernel": jnp.zeros(1)}}, noise, text, null, table, 3.0)
    np.testing.assert_allclose(pictures, -0.4 * table.times[0], rtol=1e-4)


# PiD teacher


def test_latent_is_the_encoded_small_picture():
    objective = teacher(noising={"enabled": False})
    batch = teacher_batch()
    small, latent, sigma = objective.degrade(batch["image"], batch["sigma_range"],
                                             jax.random.key(0))
    assert small.shape == (4, 8, 12, 3) and latent.shape == (4, 2, 3, 3)
    np.testing.assert_allclose(latent, Codec().encode(small), rtol=1e-6)
    assert not sigma.any()


def test_dropped_latent_is_zero_and_keeps_its_sigma():
    objective = teacher(noising={"apply_prob": 1.0, "latent_dropout": 1.0})
    batch = teacher_batch()
    _, latent, sigma = objective.degrade(batch["image"], batch["sigma_range"], jax.random.key(0))
    assert not latent.any()
    assert ((sigma >= 0.2) & (sigma <= 0.6)).all()


def test_dropped_samples_have_no_share_in_the_alignment():
    objective = teacher()
    latent = np.ones((3, 2, 3, 3), np.float32)
    latent[1] = 0
    target = objective.alignment_target(random(3, 8, 12, 3), latent, jnp.float32([0, 0, 0.5]))
    np.testing.assert_allclose(target["align_share"], [1 / 1.5, 0, 0.5 / 1.5], rtol=1e-6)


def test_teacher_loss_is_flow_plus_weighted_alignment():
    objective = teacher(align={"weight": 0.5})
    examples = objective.examples(teacher_batch(), jax.random.key(2))
    loss, metrics = objective.loss(objective.init(jax.random.key(0)).params, examples)
    assert float(loss) == pytest.approx(
        float(metrics["flow_loss"] + 0.5 * metrics["align_loss"]), rel=1e-6)
    whole = objective.align(jnp.zeros((4, 8, 12, 3)), examples["small"], examples["sigma"],
                            jnp.any(examples["latent"] != 0, axis=(1, 2, 3)))
    assert float(metrics["align_loss"]) == pytest.approx(float(whole), rel=1e-5)


def test_source_overrides_reach_the_batch():
    objective = teacher(noising={"overrides": (("photos", 0.1, 0.3),)})
    batch = objective.prepare({"image": random(2, 16, 16, 3), "caption": ["a", "bb"],
                               "source": ["my photos", "other"]})
    np.testing.assert_allclose(batch["sigma_range"], [[0.1, 0.3], [0.0, 0.8]], rtol=1e-6)
    np.testing.assert_array_equal(batch["text"][:, 0, 0], [1, 2])


def test_sample_shows_bicubic_sample_and_truth():
    objective = teacher(lambda x, t, y, lq_latent, degrade_sigma: 0 * x, sample={"steps": 2})
    inputs = objective.sample_inputs({"image": random(2, 16, 16, 3), "caption": ["a", "b"]})
    columns = objective.sample(objective.init(jax.random.key(0)).params, inputs,
                               jax.random.key(1))
    assert list(columns) == ["bicubic", "sample", "truth"]
    assert {column.shape for column in columns.values()} == {(2, 16, 16, 3)}
    assert np.abs(columns["sample"]).max() <= 1


# Updates


def test_averages_follow_the_power_schedule():
    objective = text_to_image(lambda x, *_: x)
    state = objective.init(jax.random.key(0))
    average, exponent = None, schedules.ema_exponent(0.1)
    for i in range(5):
        grads = {"lq_proj": {"kernel": jnp.float32([[1, -1], [0.5, 2]]) * (i + 1)}}
        state, _ = objective.update(state, grads)
        beta = 0.0 if i == 0 else (1 - 1 / (i + 1)) ** (exponent + 1)
        kernel = np.float64(state.params["lq_proj"]["kernel"])
        average = kernel if average is None else beta * average + (1 - beta) * kernel
        np.testing.assert_allclose(state.ema["ema"]["lq_proj"]["kernel"], average, rtol=1e-6)
    assert int(state.step) == 5


def test_averages_can_be_switched_off():
    config = base_config()
    config.ema.enabled = False
    assert TextToImage(config, Net(), Text()).init(jax.random.key(0)).ema == {}


def test_accumulated_gradient_is_the_big_batch_gradient():
    objective = teacher(noising={"latent_dropout": 0.3})
    objective.net = LinearNet()
    params = objective.init(jax.random.key(0)).params
    examples = objective.examples(teacher_batch(8), jax.random.key(5))
    metrics, grads = objective.gradients(params, examples)
    objective.config.optim.accumulate = 4
    metrics4, grads4 = objective.gradients(params, examples)
    for name, value in metrics.items():
        np.testing.assert_allclose(metrics4[name], value, rtol=1e-5)
    kernel = grads["lq_proj"]["kernel"]
    assert jnp.abs(kernel).min() > 1e-3
    np.testing.assert_allclose(grads4["lq_proj"]["kernel"], kernel, rtol=1e-5)


def test_frozen_backbone_has_no_gradient_and_no_moments():
    config = tiny.config("pid_teacher", "unused")
    config.model.train_lq_proj_only = True
    objective = objectives.build(config)
    state = jax.eval_shape(objective.init, jax.random.key(0))
    assert set(state.opt_state.adam[0].mu) == {"lq_proj", "pit_lq_gate"}
    assert set(state.ema["ema"]) == set(state.params)


# Parts that do not fit


@pytest.mark.parametrize("change, sentence", [
    ({"model": networks.pidnet()}, "trains the model 'pixeldit_t2i', but config.model.name is"),
    ({"text": {"name": "hashed", "width": 8, "length": 4}}, "width 8, the network reads 16"),
    ({"text": {"name": "hashed", "width": 16, "length": 9}},
     "9 tokens, the network reads at most 4"),
    ({"text": {"name": "gemma3"}}, "unknown text encoder"),
])
def test_text_to_image_parts_must_fit(change, sentence):
    config = tiny.config("pixeldit_t2i", "unused")
    for name, value in change.items():
        config[name] = ConfigDict(value)
    with pytest.raises(UserError, match=sentence):
        objectives.build(config)


@pytest.mark.parametrize("change, sentence", [
    ({"lq_latent_channels": 4}, "makes latents of 16 channels, the network reads 4"),
    ({"latent_spatial_down_factor": 16}, "covers 8 pixels, the network expects 16"),
    ({"patch_sise": 4}, "has no option 'patch_sise'"),
])
def test_teacher_parts_must_fit(change, sentence):
    config = tiny.config("pid_teacher", "unused")
    with config.unlocked():
        config.model.update(change)
    with pytest.raises(UserError, match=sentence):
        objectives.build(config)


@pytest.mark.parametrize("size, sentence", [
    ((36, 32), "the patch size .8. does not divide 36; choose 32 or 40"),
    ((4, 32), "does not divide 4; choose 8$"),
    ((32, 2**17), "a side has at most 16384"),
    ((40, 32), "sr_scale 2 x codec factor 8 .16. does not divide 40; choose 32 or 48"),
])
def test_picture_sizes_must_fit(size, sentence):
    with pytest.raises(UserError, match=sentence):
        objectives.build(tiny.config("pid_teacher", "unused")).check_picture(*size)
