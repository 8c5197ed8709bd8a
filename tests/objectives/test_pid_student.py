"""Distillation: phases, what each of them moves, the student's inputs, drawing, its references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax import objectives
from pid_jax.diffusion import few_step, flow
from pid_jax.errors import UserError
from pid_jax.objectives.pid_student import (DISCRIMINATOR, FAKE_SCORE, STUDENT, TEACHER,
                                            PidStudent, networks)
from tests import tiny
from tests.objectives.stubs import Codec, Net, Text


def random(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def config(**changes):
    result = tiny.config("pid_student", "unused")
    for path, value in changes.items():
        result.distill[path] = value
    return result


class Student(PidStudent):
    """On stand-ins, with nothing frozen inside a network."""

    def frozen_rules(self):
        return ()


class Judge:
    """Logits are the means of the features; one weight."""

    taps = (0,)

    def init(self, key, method):
        return {"params": {"conv": {"kernel": jnp.ones(())}}}

    def apply(self, variables, features):
        return variables["params"]["conv"]["kernel"] * features[0].mean((1, 2, 3))[:, None]


class Denoiser(Net):
    """A network whose only feature is its input."""

    def apply(self, variables, x, t, y, return_features_early=False, feature_indices=(), **inputs):
        return super().apply(variables, x, t, y, **inputs).replace(features=(x,))


def student(answer=lambda x, t, y, **_: 0.5 * x, **changes):
    return Student(config(**changes), Denoiser(answer), Judge(), Text(), Codec())


def batch(size=4):
    return {"image": random(size, 16, 24, 3), "text": random(size, 3, 2, seed=1),
            "null_text": np.full((size, 3, 2), 0.25, np.float32),
            "sigma_range": np.tile(np.float32([0.2, 0.6]), (size, 1))}


def shifted_state(objective):
    """A state whose networks differ."""
    state = objective.init(jax.random.key(0))
    return state.replace(companions=jax.tree.map(lambda leaf: leaf + 0.1, state.companions))


def changed(before, after):
    return {name for name, tree in networks(before).items() if any(
        (old != new).any() for old, new in zip(jax.tree.leaves(tree),
                                               jax.tree.leaves(networks(after)[name])))}


def test_one_student_update_opens_each_round():
    objective = student(student_every=3)
    assert [objective.phase(step) for step in range(5)] == [
        STUDENT, FAKE_SCORE, FAKE_SCORE, STUDENT, FAKE_SCORE]


def test_each_phase_moves_its_own_networks():
    objective = student(lambda x, t, y, **_: x * y.mean())
    start = shifted_state(objective)
    grads = {name: jax.tree.map(jnp.ones_like, tree) for name, tree in networks(start).items()}
    after_student, metrics = objective.update(start, grads)
    assert changed(start, after_student) == {STUDENT}
    after_fake, fake_metrics = objective.update_companions(start, grads)
    assert changed(start, after_fake) == {FAKE_SCORE, DISCRIMINATOR}
    assert int(after_student.step) == int(after_fake.step) == 1
    assert "discriminator_grad_norm" in fake_metrics and "grad_norm" in metrics


def test_averages_and_schedules_count_updates_of_their_own_phase():
    objective = student(student_every=3)
    grads = {name: jax.tree.map(jnp.ones_like, tree)
             for name, tree in networks(objective.init(jax.random.key(0))).items()}
    state = objective.init(jax.random.key(0))
    updates = {STUDENT: objective.update, FAKE_SCORE: objective.update_companions}
    for step in range(7):
        state, _ = updates[objective.phase(step)](state, grads)
    tried = {name: int(opt.schedule_step) for name, opt in state.opt_state.items()}
    assert tried == {STUDENT: 3, FAKE_SCORE: 4, DISCRIMINATOR: 4}
    # The third student update averages as iteration 2.
    weight = objective.averages[0].new_weight(2)
    assert 0 < weight < objective.averages[0].new_weight(1) < 1


def test_discriminator_is_not_clipped():
    objective = student()
    clips = {name: optimizer.clip.max_norm
             for name, optimizer in objective.companion_optimizers.items()}
    assert clips == {FAKE_SCORE: objective.config.optim.clip_norm, DISCRIMINATOR: np.inf}


def test_without_gan_weight_there_is_no_discriminator():
    objective = student(gan_weight=0.0)
    state = objective.init(jax.random.key(0))
    assert set(state.companions) == set(state.opt_state) - {STUDENT} == {FAKE_SCORE}
    loss, metrics = objective.loss(networks(state), objective.examples(batch(), jax.random.key(1)))
    assert "gan_loss" not in metrics and loss == metrics["vsd_loss"]


def test_frozen_networks_have_no_moments():
    objective = student()
    state = objective.init(jax.random.key(0))
    assert set(state.opt_state) == {STUDENT, FAKE_SCORE, DISCRIMINATOR}
    assert set(state.frozen) == {TEACHER} and set(state.ema["ema"]) == set(state.params)


def test_teacher_is_stored_in_bfloat16_where_asked():
    state = student(frozen_dtype="bfloat16").init(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.frozen)} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


# The student's inputs.


def test_teacher_forcing_noises_real_pictures_at_the_trained_times():
    objective = student()
    examples = objective.examples(batch(64), jax.random.key(2))
    x, t = objective.student_input(None, examples)
    assert set(np.round(np.asarray(t), 3)) == {np.float32(0.999), np.float32(0.866),
                                               np.float32(0.634), np.float32(0.342)}
    np.testing.assert_allclose(x, flow.interpolate(examples["image"], examples["noise"], t))


def test_one_step_starts_from_noise():
    objective = student(steps=1)
    examples = objective.examples(batch(), jax.random.key(2))
    x, t = objective.student_input(None, examples)
    np.testing.assert_array_equal(x, examples["noise"])
    assert (t == 1).all()


@pytest.mark.parametrize("sampler", ["ode", "sde"])
def test_roll_out_is_the_sampler_stopped_early_for_any_batch(sampler):
    objective = student(input="self_rollout", sampler=sampler)
    params = objective.init(jax.random.key(0)).params
    examples = objective.examples(batch(3), jax.random.key(2))
    assert len(set(np.asarray(examples["step_index"]))) == 1
    predict = lambda x, t: objective.call(params, x, t, examples["text"], examples).x
    draw = (lambda i: examples["fresh"][:, i]) if sampler == "sde" else None
    for last in range(4):
        x, t = objective.roll_out(params, examples | {"step_index": jnp.full(3, last)})
        assert t.shape == (3,) and float(t[0]) == pytest.approx(objective.times[last])
        expected = examples["noise"]
        for i in range(last):
            row = jax.tree.map(lambda column: column[i], few_step.make_table(
                objective.times, "velocity", sampler))
            expected = few_step.advance(expected, predict(expected, jnp.full(3, row.times)), row,
                                        i, draw)
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)


def test_no_gradient_flows_through_the_roll_out():
    objective = student(lambda x, t, y, **_: x, input="self_rollout", sampler="ode")
    params = objective.init(jax.random.key(0)).params
    examples = objective.examples(batch(2), jax.random.key(2)) | {"step_index": jnp.full(2, 3)}
    gradient = jax.grad(lambda p: objective.student_input(p, examples)[0].sum())(params)
    assert not jax.tree.leaves(gradient)[0].any()


def test_times_are_clipped_and_not_shifted():
    objective = student()
    np.testing.assert_allclose(objective.clip_times(jnp.float32([-9, 9])), [0.02, 0.99])
    times = objective.draw_times(jax.random.key(0), 4001, 8, 8)
    assert np.median(times) == pytest.approx(0.5, abs=0.03)


# Guidance and drawing.


def test_only_the_teacher_is_guided():
    def answer(x, t, y, **_):
        return 0 * x + y[:, :1, :1, None]

    objective = student(answer, teacher_guidance=3.0)
    examples = objective.examples(batch(2), jax.random.key(2)) | {
        "text": np.full((2, 3, 2), 0.5, np.float32)}
    params, x_t = {"lq_proj": {"kernel": jnp.zeros(1)}}, examples["noise"]
    conditional = objective.call(params, x_t, examples["t"], examples["text"], examples).x
    t = flow.per_sample(examples["t"], x_t)
    np.testing.assert_allclose(objective.teacher_x0(params, conditional, x_t, examples),
                               x_t - t * 1.0, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(objective.fake_x0(params, x_t, examples), x_t - t * 0.5,
                               rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_student_draws_with_one_call_a_step(steps):
    calls = []

    def answer(x, t, y, **_):
        jax.debug.callback(lambda: calls.append(1))
        return 0.5 * x

    objective = student(answer)
    table = objective.solver_table(16, 16, steps)
    noise, latent = jnp.ones((1, 16, 16, 3)), jnp.ones((1, 2, 2, 3))
    drawn = objective.decode({"lq_proj": {"kernel": jnp.zeros(1)}}, noise, latent, jnp.zeros(1),
                             jnp.ones((1, 3, 2)), None, table, 1.0,
                             few_step.gaussian_draws(jax.random.key(0), noise.shape))
    jax.effects_barrier()
    assert len(calls) == table.steps == steps and np.abs(drawn).max() <= 1


# What is refused.


@pytest.mark.parametrize("changes, sentence", [
    ({"times": (0.9, 0.0)}, "distill.times holds 2 times; 4 steps .* need 5"),
    ({"times": (0.5, 0.9, 0.4, 0.2, 0.0)}, "times must fall"),
])
def test_times_must_fit(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        student(**changes).solver_table(16, 16, 4)


def test_a_teacher_must_be_named():
    with pytest.raises(UserError, match="config.distill.teacher is not set"):
        student(untrained_teacher=False).frozen_sources()
    objective = student()
    assert objective.frozen_sources() == {TEACHER: None}
    objective.config.init_from = "somewhere"
    assert objective.frozen_sources() == {TEACHER: "somewhere"}


def test_discriminator_fits_the_network():
    objective = objectives.build(tiny.config("pid_student", "unused"))
    assert objective.discriminator.taps == (0, 1) and not objective.net.lq_aux_rgb_head
    shapes = jax.eval_shape(functools.partial(objective.init), jax.random.key(0))
    assert not any("aux" in path for path in shapes.params["lq_proj"])
