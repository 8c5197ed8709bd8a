"""Packs the 1,797 real handwritten digits that scikit-learn ships, each with its class.

    python -m pid_jax.data.digits --dst runs/digits

The 8 x 8 grey scans (16 levels; E. Alpaydin, C. Kaynak, UCI repository, 1998) are enlarged by
whole factors, so that nothing is invented. The record's caption `label` is the digit.
"""

import importlib.util
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from pid_jax.data import command
from pid_jax.data.destination import staged_folder
from pid_jax.data.ingest import pack
from pid_jax.errors import UserError

SOURCE = "scikit-learn digits"
SIDE, LEVELS = 8, 16
SHARD_BYTES = 256 << 20


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Pictures uint8 [1797, 8, 8] in 0..255 and their digits int [1797]; UserError without
    scikit-learn."""
    if importlib.util.find_spec("sklearn") is None:
        raise UserError("the digits come with scikit-learn, which is not installed; install it "
                        "with `pip install scikit-learn`")
    from sklearn import datasets
    digits = datasets.load_digits()
    return np.rint(digits.images * (255 / LEVELS)).astype(np.uint8), digits.target


def digit_items(size: int) -> Iterator[pack.Item]:
    """Items of all digits as `size` x `size` PNG files; `size` is a multiple of 8."""
    if size < SIDE or size % SIDE:
        raise UserError(f"--size is {size}; expected a multiple of {SIDE}")
    for number, (picture, digit) in enumerate(zip(*load_digits())):
        large = picture.repeat(size // SIDE, axis=0).repeat(size // SIDE, axis=1)
        yield pack.Item(f"{digit}/{number:04d}", f"digit {number}",
                        lambda large=large: _png(large), lambda digit=digit: {"label": str(digit)})


def _png(picture: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


def main(arguments: Sequence[str]) -> None:
    """Parses the command line and packs."""
    parser = command.Parser(prog="python -m pid_jax.data.digits", description=__doc__)
    parser.add_argument("--dst", type=Path, required=True, help="folder for the data set")
    parser.add_argument("--size", type=int, default=16, metavar="PIXELS", help="side, default 16")
    parser.add_argument("--overwrite", action="store_true",
                        help="replace the data set at --dst, once the new one is complete")
    options = parser.parse_args(arguments)
    with staged_folder(options.dst, options.overwrite) as stage:
        summary = pack.pack(digit_items(options.size), stage, SOURCE, SHARD_BYTES)
    for line in summary.lines(options.dst):
        command.show(line)


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
