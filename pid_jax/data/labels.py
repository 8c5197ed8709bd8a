"""Classes of pictures, carried by the data as a caption that is the number of a class."""

from collections.abc import Sequence

import numpy as np

from pid_jax.errors import UserError


def class_numbers(captions: Sequence[str], classes: int) -> np.ndarray:
    """int32 [B] of captions such as "207"; an empty caption gives `classes`, which means none.

    Raises UserError for a caption that is no number from 0 to classes - 1.
    """
    return np.array([_class_number(caption.strip(), classes) for caption in captions], np.int32)


def _class_number(caption: str, classes: int) -> int:
    if not caption:
        return classes
    if not (caption.isascii() and caption.isdigit() and int(caption) < classes):
        raise UserError(f"the caption {caption[:40]!r} is no class: expected a number from 0 to "
                        f"{classes - 1} (pack the data with a caption called label, and set "
                        "config.data.caption_fields=('label',))")
    return int(caption)
