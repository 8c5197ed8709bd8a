import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax import encoders, objectives
from pid_jax.diffusion import losses
from pid_jax.encoders import repa_teacher
from pid_jax.errors import UserError
from pid_jax.objectives.pixeldit_c2i import PixelDitC2I
from tests import tiny


def objective(**changes):
    config = tiny.config("pixeldit_c2i", "unused")
    for path, value in changes.items():
        section, key = path.split("__")
        config[section][key] = value
    return objectives.build(config)


def test_labels_and_what_is_no_label():
    assert list(objective().labels(["0", "", "2"])) == [0, 3, 2]
    with pytest.raises(UserError, match="'cat' is no class"):
        objective().labels(["cat"])
    with pytest.raises(UserError, match="'3' is no class"):
        objective().labels(["3"])


def test_times_lie_between_noise_and_clean_and_shift_to_noise():
    draws = jnp.linspace(-3, 3, 7)
    plain, shifted = objective().times(draws), objective(flow__shift=3.0).times(draws)
    assert np.all((0 < plain) & (plain < 1)) and np.all(shifted < plain)
    uniform = objective(flow__time_distribution="uniform")
    np.testing.assert_allclose(uniform.times(jnp.array([0.25])), [0.25])


def test_a_step_with_alignment_lowers_the_loss():
    built = objective(repa__weight=0.5, repa__block=1, model__repa_features=16,
                      optim__lr=1e-2, optim__clip_norm=1.0)
    state = jax.jit(built.init)(jax.random.key(0))
    batch = {"image": jnp.full((4, 16, 16, 3), 0.5), "label": jnp.array([0, 1, 2, 3])}
    step = jax.jit(built.step)
    state, first = step(state, batch)
    for _ in range(15):
        state, last = step(state, batch)
    assert {"flow_loss", "repa_loss"} <= last.keys()
    assert float(last["loss"]) < float(first["loss"])
    assert sorted(state.ema) == ["ema", "ema2"]


def test_alignment_needs_both_a_weight_and_a_projector():
    with pytest.raises(UserError, match="needs both above 0"):
        objective(repa__weight=0.5)
    with pytest.raises(UserError, match="features of 16 numbers"):
        objective(repa__weight=0.5, repa__block=1, model__repa_features=7)
    with pytest.raises(UserError, match="config.repa.block is 9"):
        objective(repa__weight=0.5, repa__block=9, model__repa_features=16)


def test_drawing_is_guided_towards_the_class():
    built = objective()
    calls = []

    class Net:
        null_label = num_classes = 3

        def apply(self, variables, x, t, label):
            calls.append(label)
            picture = jnp.broadcast_to((label / 10.0)[:, None, None, None], x.shape)
            return type("Out", (), {"x": picture - x})

    drawer = PixelDitC2I(built.config, Net())
    noise = jnp.zeros((2, 4, 4, 3))
    with jax.disable_jit():
        drawn = drawer.draw({}, noise, jnp.array([0, 1]), drawer.solver_table(4, 4, 4, 2.0))
    assert drawn.shape == noise.shape and float(drawn[1].mean()) > float(drawn[0].mean())
    assert len(calls[0]) == 2 and len(calls[-1]) == 4  # t = 0 is never guided


def test_teacher_input_and_tokens():
    images = jnp.zeros((1, 32, 16, 3))
    assert repa_teacher.dino_input(images).shape == (1, 28, 14, 3)

    class Teacher:
        channels, family = 5, "mean"

        def encode(self, images):
            return jnp.ones((len(images), 4, 2, 5))

    dino = encoders.build_codec("dinov2", weights="random")
    assert repa_teacher.teacher_tokens(dino, images).shape == (1, 2, dino.channels)
    tokens = repa_teacher.teacher_tokens(Teacher(), images)
    assert tokens.shape == (1, 8, 5)
    assert float(losses.alignment_loss(tokens, 2 * tokens)) == pytest.approx(0, abs=1e-6)
