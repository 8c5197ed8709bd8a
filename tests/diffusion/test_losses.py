import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.diffusion import losses
from pid_jax.errors import UserError


def normal(seed, shape=(3, 5, 4, 3), scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def exact_direction(generated, teacher, fake):
    generated, teacher, fake = (a.astype(np.float64) for a in (generated, teacher, fake))
    scale = 1 / (np.abs(generated - teacher).mean(axis=(1, 2, 3), keepdims=True) + 1e-6)
    return np.nan_to_num((fake - teacher) * scale, nan=0.0, posinf=0.0, neginf=0.0)


def test_vsd_without_an_exact_match_equals_float64():
    arguments = normal(0), normal(1), normal(2)
    loss, gradient = jax.value_and_grad(losses.vsd_loss)(*arguments)
    expected = exact_direction(*arguments)
    np.testing.assert_allclose(loss, 0.5 * np.mean(expected**2), rtol=1e-6)
    np.testing.assert_allclose(gradient, expected / expected.size, rtol=2e-6, atol=1e-10)


def test_vsd_gradient_survives_when_tiny_beside_the_picture():
    generated, teacher = normal(0), normal(1)
    fake = teacher + normal(2, scale=1e-6)
    gradient = jax.grad(losses.vsd_loss)(generated, teacher, fake)
    expected = exact_direction(generated, teacher, fake)
    np.testing.assert_allclose(gradient, expected / expected.size, rtol=2e-6)


def test_vsd_zeroes_what_is_not_finite_and_reaches_the_student_only():
    generated, teacher, fake = normal(0), normal(1), normal(2)
    fake[0, 0, 0, 0], fake[1, 2, 1, 1] = np.nan, -np.inf
    teacher[2, 0, 0, 1] = np.nan
    gradients = jax.grad(losses.vsd_loss, (0, 1, 2))(generated, teacher, fake)
    assert np.all(np.isfinite(gradients[0])) and gradients[0][0, 0, 0, 0] == 0
    assert np.all(gradients[0][2] == 0) and np.any(gradients[0][1] != 0)
    assert np.all(gradients[1] == 0) and np.all(gradients[2] == 0)


def test_dsm_targets():
    picture, noise = normal(0), normal(1)
    np.testing.assert_array_equal(losses.dsm_target(picture, noise, "velocity"), noise - picture)
    np.testing.assert_array_equal(losses.dsm_target(picture, noise, "x0"), picture)


def test_gan_losses_stay_finite_for_sure_discriminators():
    assert losses.gan_generator_loss(jnp.asarray([[-200.0]])) == 200.0
    assert losses.gan_discriminator_loss(jnp.asarray([[90.0]]), jnp.asarray([[-90.0]])) < 1e-6


def test_align_weights_dropped_and_black_samples_out():
    prediction, target = normal(0, (3, 4, 4, 3), 0.5), normal(1, (3, 4, 4, 3), 0.5)
    target[2] = 0.0
    loss = losses.AlignLoss()
    alone = loss(prediction[:1], target[:1])
    kept = loss(prediction, target, keep=np.array([1, 0, 1]))
    np.testing.assert_allclose(kept, alone, rtol=1e-6)
    assert loss(prediction, target, sigma=np.full(3, 1.0, np.float32)) == 0.0


def test_align_of_micro_batches_adds_up_to_the_batch():
    prediction, target = normal(0, (4, 4, 4, 3), 0.5), normal(1, (4, 8, 8, 3), 0.5)
    sigma, loss = np.float32([0.1, 0.9, 0.4, 0.0]), losses.AlignLoss()
    share = losses.shares(loss.weights(target, sigma))
    parts = [jnp.sum(share[i:i + 2] * loss.distances(prediction[i:i + 2], target[i:i + 2]))
             for i in (0, 2)]
    np.testing.assert_allclose(sum(parts), loss(prediction, target, sigma), rtol=1e-6)


def test_align_clamps_after_the_resize():
    """Pixels of 3 and -1 average to 1: clamping first would give 0."""
    target = np.tile(np.float32([3.0, -1.0])[None, None, :, None], (1, 2, 1, 3))
    assert losses.AlignLoss()(np.ones((1, 1, 1, 3), np.float32), target) == 0.0


def test_latent_is_kept():
    latent = np.zeros((2, 2, 2, 3), np.float32)
    latent[1, 1, 0, 2] = -1e-20
    assert losses.latent_is_kept(latent).tolist() == [False, True]


def test_repa_ignores_length_of_vectors_and_resizes_the_larger_grid():
    tokens = normal(0, (2, 16, 8))
    np.testing.assert_allclose(losses.repa_loss(tokens, 7.0 * tokens), 0.0, atol=1e-6)
    flat = np.broadcast_to(normal(1, (2, 1, 8)), (2, 16, 8))
    np.testing.assert_allclose(losses.repa_loss(flat, flat[:, :9]), 0.0, atol=1e-6)
    with pytest.raises(UserError, match="square"):
        losses.repa_loss(tokens, tokens[:, :6])


def test_repa_gradient_is_finite_at_zero_tokens():
    gradient = jax.grad(losses.repa_loss)(np.zeros((1, 4, 3), np.float32), normal(0, (1, 4, 3)))
    assert np.all(np.isfinite(gradient))


def test_r1_gradient_flows_through_both_logits():
    real, perturbed = jax.grad(losses.r1_penalty, (0, 1))(jnp.ones((2, 1)), jnp.zeros((2, 1)))
    np.testing.assert_allclose(real, -perturbed)
    assert np.all(real == 1.0)
