import jax
import numpy as np
import pytest
from PIL import Image

from pid_jax.diffusion import degrade, noising, resampling
from pid_jax.errors import UserError

MATRICES = [resampling.bicubic_antialias_matrix, resampling.bicubic_matrix,
            resampling.bilinear_matrix, resampling.adaptive_mean_matrix,
            resampling.coverage_matrix]


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("sizes", [(7, 3), (8, 2), (5, 5), (101, 25)])
def test_every_resize_keeps_constants_and_symmetry(matrix, sizes):
    weights = matrix(*sizes)
    assert weights.shape == sizes[::-1] and weights.dtype == np.float32
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-6)
    np.testing.assert_allclose(weights, weights[::-1, ::-1], atol=1e-6)
    if sizes[0] == sizes[1]:
        np.testing.assert_allclose(weights, np.eye(sizes[0]), atol=1e-6)


@pytest.mark.parametrize("size", [(6, 9), (17, 11), (50, 40)])
def test_bicubic_equals_pillow(size):
    image = np.random.default_rng(0).random((24, 31)).astype(np.float32)
    expected = np.asarray(Image.fromarray(image).resize(size[::-1], Image.BICUBIC))
    got = resampling.resize(image[None, :, :, None], *size, resampling.bicubic_antialias_matrix)
    np.testing.assert_allclose(got[0, :, :, 0], expected, atol=2e-6)


def test_downsample_clips_ringing_and_refuses_nonsense():
    edges = np.sign(np.random.default_rng(0).standard_normal((1, 16, 16, 3))).astype(np.float32)
    small = degrade.downsample(edges, 1.5)
    assert small.shape == (1, 10, 10, 3) and np.abs(small).max() <= 1.0
    for factor in (0.5, 40):
        with pytest.raises(UserError, match="factor"):
            degrade.downsample(edges, factor)


def test_stated_range_is_not_guessed():
    bright = np.float32([[0.0, 0.5], [1.0, 0.25]])
    np.testing.assert_array_equal(degrade.normalize_image(bright, "signed"), bright)
    np.testing.assert_array_equal(degrade.normalize_image(bright, "unit"), 2 * bright - 1)
    np.testing.assert_array_equal(degrade.normalize_image(bright), 2 * bright - 1)
    np.testing.assert_allclose(degrade.normalize_image(np.float32([0, 255]), "uint8"), [-1, 1])
    with pytest.raises(UserError, match="bytes"):
        degrade.normalize_image(bright, "bytes")


# noising


def draws(batch, shape, u=0.5):
    constant = np.full(batch, u, np.float32)
    noise = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return noising.NoiserDraws(constant, constant, constant, noise)


def test_untouched_latents_are_bit_identical():
    latent = np.random.default_rng(1).standard_normal((2, 3, 3, 4)).astype(np.float32)
    for noiser in (noising.LatentNoiser(apply_prob=0.4),
                   noising.LatentNoiser(apply_prob=1.0, clean_ratio=0.6)):
        noised, sigma = noiser.apply(latent, noiser.sigma_ranges(None, 2),
                                     draws(2, latent.shape))
        np.testing.assert_array_equal(noised, latent)
        np.testing.assert_array_equal(sigma, 0.0)


def test_first_matching_source_wins_and_empty_matches_none():
    noiser = noising.LatentNoiser(overrides=(
        noising.SigmaOverride("", 0.9, 1.0), noising.SigmaOverride("text", 0.0, 0.2),
        noising.SigmaOverride("arxiv", 0.5, 0.6)))
    ranges = noiser.sigma_ranges(["photos", "text/arxiv", "arxiv"], 3)
    np.testing.assert_allclose(ranges, [[0.0, 0.8], [0.0, 0.2], [0.5, 0.6]])
    np.testing.assert_allclose(noiser.sigma_ranges("arxiv", 2), [[0.5, 0.6]] * 2)
    with pytest.raises(UserError, match="3 sources"):
        noiser.sigma_ranges(["a", "b", "c"], 2)


def test_variance_preserving_path_preserves_variance():
    noiser = noising.LatentNoiser(apply_prob=1.0, sigma_min=0.6, sigma_max=0.6, path="vp")
    latent = np.random.default_rng(1).standard_normal((4, 32, 32, 4)).astype(np.float32)
    given = noising.draw(jax.random.key(0), latent.shape)
    noised, sigma = jax.jit(noiser.apply)(latent, noiser.sigma_ranges(None, 4), given)
    assert abs(np.std(noised) - 1.0) < 0.02 and np.allclose(sigma, 0.6)


def test_bad_noisers_are_refused():
    with pytest.raises(UserError, match="cosine"):
        noising.LatentNoiser(path="cosine")
    with pytest.raises(UserError, match="0.9..0.1"):
        noising.LatentNoiser(sigma_min=0.9, sigma_max=0.1)
