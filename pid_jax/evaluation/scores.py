"""All scores of a set of drawn pictures against a reference."""

from collections.abc import Mapping

import numpy as np

from pid_jax.evaluation import artefacts
from pid_jax.evaluation.features import Reference
from pid_jax.evaluation.frechet import fit, frechet_distance, inception_score, precision_recall

FRECHET = {"fid": "pooled", "sfid": "spatial", "pixel_frechet": "pixels"}
SPLIT = 5000  # pictures of a part of the Inception Score, as ADM scores 50,000 in ten parts


def score(features: Mapping[str, np.ndarray], reference: Reference | None) -> dict[str, float]:
    """Scores by name; those whose features or reference are not there are left out.

    Args:
      features: by kind, rows in the order of the samples.
    """
    found = {}
    if reference is not None:
        found |= {name: frechet_distance(fit(features[kind]), reference.gaussians[kind])
                  for name, kind in FRECHET.items()
                  if kind in features and kind in reference.gaussians}
    if "logits_unbiased" in features:
        splits = max(1, len(features["logits_unbiased"]) // SPLIT)
        mean, deviation = inception_score(features["logits_unbiased"], splits)
        found |= {"inception_score": mean, "inception_score_std": deviation,
                  "inception_score_splits": splits}
    if reference is not None and reference.pooled is not None and "pooled" in features:
        precision, recall = precision_recall(reference.pooled, features["pooled"])
        found |= {"precision": precision, "recall": recall}
    return found


def artefact_scores(pictures: np.ndarray, period: int) -> dict[str, float | bool]:
    """Patch-periodic artefacts of pictures [B, H, W, 3]; empty where they are too small."""
    if period < 2 or min(pictures.shape[1:3]) < 3 * period:
        return {}
    found = artefacts.patch_artefacts(pictures, period)
    return {"artefact_pattern": found.pattern, "artefact_seams": found.seams,
            "artefact_flag": found.flagged}
