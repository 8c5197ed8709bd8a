"""Moves arrays between the golden files' torch layouts and ours."""

import numpy as np


def to_nhwc(array: np.ndarray) -> np.ndarray:
    """[..., C, H, W] -> [..., H, W, C]."""
    return np.moveaxis(array, -3, -1)


def to_nchw(array) -> np.ndarray:
    """[..., H, W, C] -> [..., C, H, W]."""
    return np.moveaxis(np.asarray(array), -1, -3)
