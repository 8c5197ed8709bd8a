"""Sheets of pictures, and PNG files that appear complete or not at all."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from pid_jax.files import atomic_write
from pid_jax.images import to_uint8


def grid(columns: Sequence[np.ndarray], gap: int = 2) -> np.ndarray:
    """Lays pictures out, one column for each array: uint8 [rows * H, columns * W, 3] with gaps.

    Args:
      columns: arrays [B, H, W, 3] in [-1, 1] of one shape; row i shows picture i of each.
      gap: white pixels between pictures.
    """
    batch, height, width, _ = columns[0].shape
    sheet = np.full((batch * (height + gap) - gap, len(columns) * (width + gap) - gap, 3), 255,
                    np.uint8)
    for column, pictures in enumerate(columns):
        for row, picture in enumerate(to_uint8(pictures)):
            top, left = row * (height + gap), column * (width + gap)
            sheet[top:top + height, left:left + width] = picture
    return sheet


def save_png(path: Path, picture: np.ndarray) -> None:
    """Writes uint8 [H, W, 3] as a PNG that appears complete or not at all."""
    with atomic_write(path, "wb") as file:
        Image.fromarray(picture).save(file, format="PNG")
