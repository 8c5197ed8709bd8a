"""How strongly pictures carry a pattern that repeats with the network's patches.

Gradients between neighbouring pixels are folded over the period: position x belongs to the phase
x mod period. Without a pattern all phases are alike up to chance. Two foldings, each along rows
and columns, the stronger counted:

    pattern   of the signed gradient: something repeated is added to every patch
    seams     of the gradient's size: patch borders are sharper or flatter than the inside

Both are amplitudes over the phases relative to the gradient's own size, with the amplitude that
chance gives taken off; 0 is none. A picture set is flagged above `FLAG`.
"""

from typing import NamedTuple

import numpy as np

from pid_jax.errors import UserError

LUMA = np.float64([0.299, 0.587, 0.114])
FLAG = 0.06
CHANCE = 3.0  # standard errors of a phase's mean that are put down to chance


class Artefacts(NamedTuple):
    """Amplitudes of the two foldings, and whether either is above `FLAG`."""

    pattern: float
    seams: float

    @property
    def flagged(self) -> bool:
        """Whether a person should look at the pictures."""
        return max(self) > FLAG


def patch_artefacts(pictures: np.ndarray, period: int) -> Artefacts:
    """Artefacts of a set of pictures together.

    Args:
      pictures: uint8 or float [B, H, W, 3] of one size, three periods or more on a side.
      period: the patch size in pixels, at least 2.
    """
    pictures = np.asarray(pictures)
    if period < 2 or min(pictures.shape[1:3]) < 3 * period:
        raise UserError(f"a period of {period} pixels cannot be seen in pictures of "
                        f"{pictures.shape[2]} x {pictures.shape[1]}; it needs three of them")
    luma = pictures.astype(np.float64) @ LUMA
    both = [_fold(np.diff(rows, axis=2), period) for rows in (luma, luma.swapaxes(1, 2))]
    return Artefacts(*(max(values) for values in zip(*both)))


def _fold(gradient: np.ndarray, period: int) -> tuple[float, float]:
    """(pattern, seams) of gradients [B, lines, positions] along positions."""
    size = np.sqrt(np.mean(gradient**2)) + 1e-12
    return (_amplitude(gradient.mean(axis=1) / size, period),
            _amplitude(np.abs(gradient).mean(axis=1) / size, period))


def _amplitude(profiles: np.ndarray, period: int) -> float:
    """Root mean square over phases of [B, positions] beyond what chance explains."""
    whole = profiles[:, :profiles.shape[1] // period * period]
    samples = whole.reshape(-1, period) - whole.mean()  # [one a repetition, phase]
    means = samples.mean(axis=0)
    chance = np.mean(np.var(samples, axis=0, ddof=1)) / len(samples)
    return float(np.sqrt(max(0.0, np.mean(means**2) - CHANCE * chance)))
