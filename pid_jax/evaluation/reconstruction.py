"""Scores of reconstructions, gathered batch by batch; the variants are named as they are defined.

| metric                | definition                                                            |
|-----------------------|-----------------------------------------------------------------------|
| psnr, ssim            | of rounded bytes, mean over pictures; equal ones count 100 dB          |
| psnr_mean_colour      | PSNR of each picture's own mean colour: what no tokens are needed for  |
| psnr_mean_picture     | PSNR of the mean picture of another data set                           |
| lpips                 | LPIPS v0.1, mean over pictures                                         |
| rfid                  | Frechet distance, unbiased covariances (1d-tokenizer's evaluator)      |
| is_1_split            | Inception Score over all pictures at once, + 1e-16 in the logarithms    |
| is_10_splits          | torch-fidelity's: ten shuffled splits; needs many pictures             |
| codebook_entropy      | -sum p log2(p + 1e-8) bits over all indices                            |
| codebook_usage        | share of the codes that occur                                          |
| bpp, entropy_coded_bpp | bits a pixel: K log2(codebook) / (H W), and K H(index) / (H W)        |
"""

from collections.abc import Callable

import jax
import numpy as np

from pid_jax import images
from pid_jax.encoders.perceptual import Lpips
from pid_jax.evaluation import codebook, frechet, image_metrics, inception

SPLITS = 10
NO_INCEPTION = "no Inception weights were given (--inception_weights)"
NO_LPIPS = "no LPIPS weights were given (--lpips_weights)"


class Scores:
    """Gathers pictures [B, H, W, 3] in [-1, 1], their reconstructions and indices [B, K].

    Attributes:
      unavailable: metric -> why it is not measured.
    """

    def __init__(self, codebook_size: int,
                 inception_params: inception.InceptionParams | None = None,
                 lpips: Lpips | None = None, mean_picture: np.ndarray | None = None):
        """Args: mean_picture: float32 [H, W, 3] in [-1, 1], a baseline."""
        self.unavailable: dict[str, str] = {}
        if inception_params is None:
            self.unavailable |= dict.fromkeys(("rfid", "is_1_split", "is_10_splits"), NO_INCEPTION)
        if lpips is None:
            self.unavailable["lpips"] = NO_LPIPS
        self._size, self._mean_picture = codebook_size, mean_picture
        self._features = _feature_function(inception_params)
        self._lpips = None if lpips is None else jax.jit(lpips)
        self._counts = np.zeros(codebook_size, np.int64)
        self._means: dict[str, list[np.ndarray]] = {}
        self._real: list[np.ndarray] = []
        self._fake: list[np.ndarray] = []
        self._logits: list[np.ndarray] = []
        self._shape: tuple[int, int, int] = (0, 0, 0)

    def add(self, truth: np.ndarray, pictures: np.ndarray, indices: np.ndarray) -> None:
        """Adds a batch."""
        self._counts += codebook.histogram(indices, self._size)
        self._shape = (indices.shape[1], *truth.shape[1:3])
        true_bytes, drawn_bytes = images.to_uint8(truth), images.to_uint8(pictures)
        self._note("psnr", image_metrics.finite_psnr(drawn_bytes, true_bytes))
        self._note("ssim", image_metrics.ssim(drawn_bytes, true_bytes))
        self._baseline("psnr_mean_colour", truth.mean((1, 2), keepdims=True), truth, true_bytes)
        if self._mean_picture is not None:
            self._baseline("psnr_mean_picture", self._mean_picture, truth, true_bytes)
        if self._lpips is not None:
            self._note("lpips", np.asarray(self._lpips(pictures, truth)))
        if self._features is not None:
            self._add_features(truth, pictures)

    def results(self) -> dict[str, float]:
        """Every metric that could be measured."""
        found = {name: float(np.mean(np.concatenate(parts)))
                 for name, parts in self._means.items()}
        found |= {"codebook_entropy": codebook.entropy(self._counts),
                  "codebook_usage": codebook.usage(self._counts),
                  "bpp": codebook.fixed_bpp(self._shape[0], self._size, *self._shape[1:]),
                  "entropy_coded_bpp": codebook.entropy_coded_bpp(
                      self._shape[0], self._counts, *self._shape[1:])}
        return found | (self._inception_results() if self._features is not None else {})

    def _note(self, name: str, values: np.ndarray) -> None:
        self._means.setdefault(name, []).append(np.atleast_1d(values))

    def _baseline(self, name: str, picture: np.ndarray, truth: np.ndarray,
                  true_bytes: np.ndarray) -> None:
        drawn = images.to_uint8(np.broadcast_to(picture, truth.shape))
        self._note(name, image_metrics.finite_psnr(drawn, true_bytes))

    def _add_features(self, truth: np.ndarray, pictures: np.ndarray) -> None:
        real, fake = (self._features(inception_bytes(batch)) for batch in (truth, pictures))
        self._real.append(real[0])
        self._fake.append(fake[0])
        self._logits.append(fake[1])

    def _inception_results(self) -> dict[str, float]:
        fake, real = (np.concatenate(parts) for parts in (self._fake, self._real))
        logits = np.concatenate(self._logits)
        found = {"rfid": frechet.frechet_distance(frechet.fit(fake), frechet.fit(real)),
                 "is_1_split": frechet.inception_score(logits, eps=1e-16)[0]}
        if len(logits) >= SPLITS:
            found["is_10_splits"] = frechet.inception_score(logits, SPLITS, True, 0)[0]
        else:
            self.unavailable["is_10_splits"] = f"{len(logits)} pictures are fewer than {SPLITS}"
        return found


def inception_bytes(pictures: np.ndarray) -> np.ndarray:
    """[-1, 1] -> uint8 for Inception: scaled to 255 and truncated, as the 1d-tokenizer does.

    What lies within 1e-4 below a whole number counts as it, so that bytes come back unchanged.
    """
    unit = np.clip((np.asarray(pictures, np.float32) + 1) / 2, 0, 1)
    return (unit * 255 + 1e-4).astype(np.uint8)


def _feature_function(params: inception.InceptionParams | None
                      ) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None:
    if params is None:
        return None
    run = jax.jit(inception.inception)

    def features(pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        out = run(params, pictures)
        return np.asarray(out.pooled), np.asarray(out.logits_unbiased)

    return features
