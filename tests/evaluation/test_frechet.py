import numpy as np
import pytest
from scipy import linalg

from pid_jax.errors import UserError
from pid_jax.evaluation import frechet


def gaussian(seed, width=5):
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((width, width))
    return frechet.Gaussian(rng.standard_normal(width), root @ root.T)


def features(seed, count=40, width=6):
    return np.random.default_rng(seed).standard_normal((count, width)) * (1 + seed)


def test_commuting_gaussians_have_the_closed_form():
    a, b = (frechet.Gaussian(np.full(4, m), np.diag(v) ** 2) for m, v in (
        (0.0, [1.0, 2.0, 3.0, 0.0]), (0.5, [2.0, 2.0, 1.0, 1.0])))
    expected = 4 * 0.25 + (1 + 0 + 4 + 1)
    assert frechet.frechet_distance(a, b) == pytest.approx(expected, abs=1e-9)


def test_equals_scipys_square_root():
    a, b = gaussian(0), gaussian(1)
    cross = np.trace(linalg.sqrtm(a.covariance @ b.covariance).real)
    expected = (np.sum((a.mean - b.mean) ** 2) + np.trace(a.covariance) + np.trace(b.covariance)
                - 2 * cross)
    assert frechet.frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)


def test_same_features_are_at_distance_zero_even_when_few():
    few = frechet.fit(features(0, count=4))
    assert frechet.frechet_distance(few, few) == pytest.approx(0, abs=1e-9)


def test_large_offsets_keep_their_digits():
    shifted = frechet.fit(features(0) + 1e6)
    assert np.allclose(shifted.covariance, frechet.fit(features(0)).covariance, atol=1e-6)


def test_unequal_widths_and_single_samples_are_refused():
    with pytest.raises(UserError, match="cannot be compared"):
        frechet.frechet_distance(gaussian(0), gaussian(0, width=3))
    with pytest.raises(UserError, match="at least 2"):
        frechet.fit(features(0, count=1))


def test_score_of_sure_and_unsure_classes():
    sure = 100.0 * np.eye(8)[np.arange(80) % 8]
    assert frechet.inception_score(sure)[0] == pytest.approx(8)
    assert frechet.inception_score(np.zeros((80, 8)))[0] == pytest.approx(1)
    with pytest.raises(UserError, match="splits"):
        frechet.inception_score(sure, splits=81)


def test_precision_and_recall_of_separate_and_nested_sets():
    real, far = features(0), features(0) + 100
    assert frechet.precision_recall(real, far) == (0.0, 0.0)
    assert frechet.precision_recall(real, real) == (1.0, 1.0)
    half = real[:20]  # a part of the real set: all of it is real, not all of the real is covered
    precision, recall = frechet.precision_recall(real, half)
    assert precision == 1.0 and recall <= 1.0


def test_precision_against_brute_force():
    real, fake = features(0, 30, 3), features(1, 25, 3)
    distances = np.linalg.norm(real[:, None] - real[None], axis=-1)
    radii = np.sort(distances, axis=1)[:, 3]
    cross = np.linalg.norm(fake[:, None] - real[None], axis=-1)
    expected = np.mean(np.any(cross <= radii, axis=1))
    assert frechet.precision_recall(real, fake)[0] == pytest.approx(expected)


def test_too_few_pictures_for_neighbours():
    with pytest.raises(UserError, match="more than 3 drawn"):
        frechet.precision_recall(features(0), features(0, count=3))
