"""Distances between sets of features: Frechet (FID), Inception Score, precision and recall.

Features are computed on devices; these sums run on the host in float64, over all features in the
order of their samples, so that a result depends on neither batches nor hosts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.errors import UserError

SCORE_EPS = 1e-16
SHUFFLE_SEED = 2020
NEIGHBOURS = 3
ROWS_AT_ONCE = 10_000


class Gaussian(NamedTuple):
    """Mean [D] and unbiased covariance [D, D] of features, float64."""

    mean: np.ndarray
    covariance: np.ndarray


def fit(features: np.ndarray) -> Gaussian:
    """The Gaussian of features [N, D]; N at least 2."""
    if len(features) < 2:
        raise UserError(f"a covariance needs at least 2 samples, got {len(features)}")
    features = np.asarray(features, np.float64)
    mean = features.mean(axis=0)
    centred = features - mean
    return Gaussian(mean, centred.T @ centred / (len(features) - 1))


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)), squared (arXiv 1706.08500, equation 6).

    The last trace is the sum of the singular values of C_a^(1/2) C_b^(1/2), which covariances of
    fewer samples than features do not disturb.
    """
    if a.mean.shape != b.mean.shape:
        raise UserError(f"features of {a.mean.size} and of {b.mean.size} numbers cannot be "
                        "compared; use reference statistics made with the same network")
    roots = _symmetric_root(a.covariance) @ _symmetric_root(b.covariance)
    overlap = np.linalg.svd(roots, compute_uv=False).sum()
    difference = a.mean - b.mean
    return float(difference @ difference + np.trace(a.covariance) + np.trace(b.covariance)
                 - 2.0 * overlap)


def _symmetric_root(covariance: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(covariance)
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T


def inception_score(logits: np.ndarray, splits: int = 1, shuffle: bool = False,
                    eps: float = SCORE_EPS) -> tuple[float, float]:
    """exp of the mean divergence of each picture's classes from their average (arXiv 1606.03498).

    Args:
      logits: [N, classes] (customarily without the last bias).
      splits: consecutive parts of nearly equal size, each scored alone. Few pictures a part give
        lower scores, so name the number beside the result.
      shuffle: first permute by numpy's RandomState(2020), as torch-fidelity does.
      eps: added inside the logarithms.
    Returns:
      Mean and standard deviation over the parts.
    """
    if not 1 <= splits <= len(logits):
        raise UserError(f"{len(logits)} pictures cannot be scored in {splits} splits")
    logits = np.asarray(logits, np.float64)
    if shuffle:
        logits = logits[np.random.RandomState(SHUFFLE_SEED).permutation(len(logits))]
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    classes = weights / weights.sum(axis=1, keepdims=True)
    ends = np.arange(splits + 1) * len(logits) // splits
    scores = [_score(classes[start:end], eps) for start, end in zip(ends, ends[1:])]
    return float(np.mean(scores)), float(np.std(scores))


def _score(classes: np.ndarray, eps: float) -> float:
    average = classes.mean(axis=0)
    divergence = classes * (np.log(classes + eps) - np.log(average + eps))
    return float(np.exp(divergence.sum(axis=1).mean()))


def precision_recall(real: np.ndarray, fake: np.ndarray, neighbours: int = NEIGHBOURS
                     ) -> tuple[float, float]:
    """Share of fakes among the reals and of reals among the fakes (arXiv 1904.06991).

    A point lies among a set when it is no further from one of its members than that member is from
    its `neighbours`-th nearest other member.

    Args:
      real, fake: features [N, D] and [M, D], more than `neighbours` each.
    """
    for name, features in (("reference", real), ("drawn", fake)):
        if len(features) <= neighbours:
            raise UserError(f"precision and recall need more than {neighbours} {name} pictures, "
                            f"got {len(features)}")
    return (_share_inside(fake, real, _radii(real, neighbours)),
            _share_inside(real, fake, _radii(fake, neighbours)))


def _radii(features: np.ndarray, neighbours: int) -> np.ndarray:
    """Squared distance of each row to its k-th nearest other row."""
    parts = [np.partition(block, neighbours, axis=1)[:, neighbours]
             for block in _distance_blocks(features, features)]
    return np.concatenate(parts)


def _share_inside(points: np.ndarray, members: np.ndarray, radii: np.ndarray) -> float:
    inside = [np.any(block <= radii, axis=1) for block in _distance_blocks(points, members)]
    return float(np.mean(np.concatenate(inside)))


def _distance_blocks(a: np.ndarray, b: np.ndarray):
    """Squared distances of a few rows of `a` at a time to all of `b`, float32."""
    rows = max(1, ROWS_AT_ONCE * 1000 // max(len(b), 1))
    b = jnp.asarray(b, jnp.float32)
    for start in range(0, len(a), rows):
        yield np.asarray(_squared_distances(jnp.asarray(a[start:start + rows], jnp.float32), b))


@jax.jit
def _squared_distances(a: jax.Array, b: jax.Array) -> jax.Array:
    squares = jnp.sum(a * a, axis=1)[:, None] + jnp.sum(b * b, axis=1)
    return jnp.maximum(squares - 2.0 * jnp.matmul(a, b.T, precision="highest"), 0.0)
