"""How a set of pictures uses a codebook, and what its tokens cost in bits."""

import numpy as np

from pid_jax.errors import UserError

ENTROPY_EPS = 1e-8


def histogram(indices: np.ndarray, size: int) -> np.ndarray:
    """How often each of `size` codes stands in indices of any shape, int64 [size]."""
    indices = np.asarray(indices)
    if indices.size and not (0 <= indices.min() and indices.max() < size):
        raise UserError(f"the indices reach from {indices.min()} to {indices.max()}, but the "
                        f"codebook has {size} entries")
    return np.bincount(indices.reshape(-1), minlength=size)


def entropy(counts: np.ndarray) -> float:
    """-sum p log2(p + 1e-8) in bits over the whole histogram, as the 1d-tokenizer evaluator."""
    p = _shares(counts)
    return float(-np.sum(p * np.log2(p + ENTROPY_EPS)))


def usage(counts: np.ndarray) -> float:
    """Share of the codes that occur at all."""
    return float(np.mean(np.asarray(counts) > 0))


def fixed_bpp(tokens: int, size: int, height: int, width: int) -> float:
    """Bits a pixel when every index takes log2(size) bits: K log2(size) / (H W)."""
    return tokens * float(np.log2(size)) / (height * width)


def entropy_coded_bpp(tokens: int, counts: np.ndarray, height: int, width: int) -> float:
    """Bits a pixel of an ideal coder that knows the histogram: K entropy / (H W)."""
    p = _shares(counts)
    bits = -float(np.sum(p * np.log2(p, where=p > 0, out=np.zeros_like(p))))
    return tokens * bits / (height * width)


def _shares(counts: np.ndarray) -> np.ndarray:
    counts = np.asarray(counts, np.float64)
    if not counts.sum():
        raise UserError("there are no tokens to measure; encode at least one picture")
    return counts / counts.sum()
