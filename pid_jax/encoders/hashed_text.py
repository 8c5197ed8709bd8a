"""A text encoder without weights: every token is the normalised sum of its hashed subwords.

Words that share letters have similar embeddings, every language works, nothing is downloaded and
the numbers are the same on every machine and Python version. It knows no meaning: it tells
captions apart, which is what a demonstration or a test needs.
"""

import functools
import hashlib
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np

from pid_jax.errors import UserError

LONGEST_TOKEN = 24
SUBWORD_SIZES = (3, 4)
CACHED_TOKENS = 4096

# Scripts written without spaces (first, last code point): every character is a token.
UNSPACED = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF),
            (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))


class HashedTextEncoder:
    """The built-in `TextEncoder`.

    A token's embedding depends on its letters only (not on case, position or neighbours) and has
    root mean square 1; unused positions hold one fixed filler vector, also of root mean square 1,
    because a network's RMSNorm has an unbounded gradient at zero vectors. `null` is all filler.
    """

    def __init__(self, width: int = 256, length: int = 64):
        """Args: width: embedding size E >= 8. length: tokens T >= 1 of every caption."""
        for name, value, least in (("width", width, 8), ("length", length, 1)):
            if not isinstance(value, int) or value < least:
                raise UserError(f"text encoder 'hashed': {name} must be a whole number of at "
                                f"least {least}, got {value!r}")
        self.width = width
        self.length = length
        self._token_vector = functools.lru_cache(CACHED_TOKENS)(self._compute_token_vector)
        self.null = np.tile(_unit(_hashed(b"filler", width)), (length, 1))
        self.null.setflags(write=False)

    def embed(self, captions: Sequence[str]) -> np.ndarray:
        """B captions -> float32 [B, length, width]; an empty or blank caption gives `null`."""
        out = np.tile(self.null, (len(captions), 1, 1))
        for row, caption in zip(out, captions):
            for position, token in zip(range(self.length), tokens(caption)):
                row[position] = self._token_vector(token)
        return out

    def _compute_token_vector(self, token: str) -> np.ndarray:
        return _unit(sum(_hashed(part, self.width) for part in subwords(token)))


def _hashed(text: bytes, width: int) -> np.ndarray:
    """int64 [width], odd numbers in -255..255. Whole numbers: their sums are exact everywhere."""
    return 2 * np.frombuffer(hashlib.shake_256(text).digest(width), np.uint8).astype(np.int64) - 255


def _unit(vector: np.ndarray) -> np.ndarray:
    """`vector` scaled to root mean square 1, float32, rounded once."""
    return (vector / np.sqrt(np.sum(np.square(vector)) / vector.size)).astype(np.float32)


def tokens(caption: str) -> Iterator[str]:
    """Words, single symbols and single characters of unspaced scripts, in order.

    Case, compatibility forms (NFKC) and white space make no difference; a run of letters and digits
    longer than 24 is cut into pieces of 24.
    """
    word = ""
    for character in unicodedata.normalize("NFKC", caption).casefold():
        if _joins_word(character) and len(word) < LONGEST_TOKEN:
            word += character
            continue
        if word:
            yield word
        word = character if _joins_word(character) else ""
        if not word and not _is_blank(character):
            yield character
    if word:
        yield word


def subwords(token: str) -> list[bytes]:
    """The token itself and its runs of 3 and 4 characters, with "<" and ">" at its ends."""
    framed = f"<{token}>"
    runs = [framed[i:i + size] for size in SUBWORD_SIZES for i in range(len(framed) - size + 1)]
    return [part.encode("utf-8", "surrogatepass") for part in dict.fromkeys([framed, *runs])]


def _joins_word(character: str) -> bool:
    """Letters, digits and the marks that sit on them; not where every character is a token."""
    point = ord(character)
    return (unicodedata.category(character)[0] in "LNM"
            and not any(first <= point <= last for first, last in UNSPACED))


def _is_blank(character: str) -> bool:
    return unicodedata.category(character)[0] in "ZC" and not _is_surrogate(character)


def _is_surrogate(character: str) -> bool:
    return 0xD800 <= ord(character) <= 0xDFFF
