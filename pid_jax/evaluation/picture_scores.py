"""Scores of drawn pictures against what they should look like."""

import numpy as np

from pid_jax import images
from pid_jax.evaluation import image_metrics


def compare(drawn: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Mean PSNR (dB), SSIM and CIEDE2000 over pictures, as they would be stored in 8 bits.

    Args:
      drawn, truth: float [B, H, W, 3] in [-1, 1].
    Returns:
      `psnr` (equal pictures count 100), `ssim`, `de2000`.
    """
    drawn, truth = images.to_uint8(drawn), images.to_uint8(truth)
    return {"psnr": float(np.mean(image_metrics.finite_psnr(drawn, truth))),
            "ssim": float(np.mean(image_metrics.ssim(drawn, truth))),
            "de2000": float(np.mean(image_metrics.lq_color_de2000(drawn, truth)))}
