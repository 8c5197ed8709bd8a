"""Random numbers as a pure function of where they are used.

No generator is carried along: every draw is a hash of (seed, epoch, record, ...), so any batch can
be made again from its step alone, in any process, on any machine and numpy version.
"""

import enum

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Purpose(enum.IntEnum):
    """What a draw is for; draws of different purposes are independent. Values are never reused."""

    RECORD_ORDER = 1
    BATCH_ORDER = 2
    REPLACEMENT = 3
    CAPTION = 4
    CAPTION_DROPOUT = 5
    CROP_X = 6
    CROP_Y = 7
    SCALE = 8
    FLIP = 9
    COLOURS = 10
    SOURCE_ORDER = 11


def hashed(*words: int | np.ndarray) -> np.ndarray:
    """A uint64 hash of whole numbers, elementwise over arrays among them (at least 1-d)."""
    state = np.zeros(1, np.uint64)
    for word in words:
        bits = np.asarray(word).astype(np.int64).astype(np.uint64)
        state = _scramble((state ^ bits) + _GOLDEN)
    return state


def uniform(*words: int | np.ndarray) -> np.ndarray:
    """float64 in [0, 1), from `hashed`."""
    return (hashed(*words) >> np.uint64(11)) * 2.0**-53


def permutation(count: int, *words: int) -> np.ndarray:
    """int64 [count], a uniformly drawn order of 0..count-1."""
    return np.argsort(hashed(*words, np.arange(count)), kind="stable")


def _scramble(state: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
