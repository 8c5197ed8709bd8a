"""How many drawn digits a classifier of real ones recognises.

    python -m pid_jax.evaluate --checkpoint runs/digits/run --reference runs/digits/data \
        --count 500 --all_checkpoints --out runs/digits/scores
    python -m benchmarks.digits runs/digits/scores/*/samples.npz

The classifier is scikit-learn's logistic regression on the 8 x 8 pixels of all 1,797 real digits;
its own accuracy is shown by five-fold cross-validation.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

from pid_jax.data.digits import SIDE, load_digits
from pid_jax.evaluation.features import check_pictures, read_arrays


def main(files: Sequence[str]) -> None:
    """Prints the share of each file's pictures that are taken for their own class."""
    pictures, digits = load_digits()
    real = _pixels(pictures[..., None])
    classifier = LogisticRegression(max_iter=1000)
    print(f"real digits, five-fold: {np.mean(cross_val_score(classifier, real, digits, cv=5)):.1%}")
    classifier.fit(real, digits)
    for file in files:
        arrays = read_arrays(Path(file))
        drawn = _pixels(check_pictures(arrays["arr_0"], Path(file)))
        share = np.mean(classifier.predict(drawn) == arrays["arr_1"])
        print(f"{Path(file).parent.name}: {share:.1%} of {len(drawn)} drawn digits recognised")


def _pixels(pictures: np.ndarray) -> np.ndarray:
    """uint8 [N, H, W, C] -> mean grey of 8 x 8 cells in [0, 1], [N, 64]."""
    count, height, width, _ = pictures.shape
    cells = pictures.mean(axis=-1).reshape(count, SIDE, height // SIDE, SIDE, width // SIDE)
    return cells.mean(axis=(2, 4)).reshape(count, -1) / 255


if __name__ == "__main__":
    main(sys.argv[1:])
