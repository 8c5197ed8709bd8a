"""What does drawing in parts change? Tiles and token chunks against the whole picture.

    python -m benchmarks.tiles --checkpoint runs/quickstart --input photo.png --size 256x256 \
        --tile 64

Prints, in steps of 8-bit pixel values: the largest difference, the mean difference of every channel
(the tone), and how much steeper the difference is where tiles begin than at other borders of
patches (1: no seam); and the same of two seeds, whose ratio is what chance gives.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pid_jax import drawing_command
from pid_jax.data import command
from pid_jax.decode_requests import Wishes, picture_requests
from pid_jax.inference import PixelDecoder


def main(arguments: Sequence[str]) -> None:
    """Draws the same latent whole, in chunks, by tiles and from another seed."""
    options = parse(arguments)
    decoder = PixelDecoder.from_checkpoint(options.checkpoint)
    wishes = Wishes(size=options.size, ground_truth=True)
    request = next(picture_requests(decoder, [options.input], wishes, {}))
    draw = lambda decoder, **how: decoder.decode(request.latent[None], request.prompt, **how)[0]
    whole = draw(decoder)
    chunked = PixelDecoder.from_checkpoint(options.checkpoint, pit_chunks=options.pit_chunks)
    patch, rows = decoder.objective.net.patch_size, decoder.tile_rows(options.size, options.tile)
    borders = range(rows, whole.shape[0] // patch, rows) if rows else ()
    show("pixel blocks in chunks", draw(chunked) - whole)
    show(f"{len(borders) + 1} tiles", draw(decoder, tile=options.tile) - whole, borders, patch)
    show("another seed", draw(decoder, seed=1) - whole, borders, patch)


def show(name: str, change: np.ndarray, borders: Sequence[int] = (), patch: int = 1
         ) -> None:
    """One line about a difference [H, W, 3] of pictures in [-1, 1]."""
    change = change.astype(np.float64) * 127.5
    tone = ", ".join(f"{value:+.4f}" for value in change.mean((0, 1)))
    seam = f", seam {seam_ratio(change, borders, patch):.2f}" if borders else ""
    print(f"{name:<24} max {np.abs(change).max():8.4f}, rms {np.sqrt(np.mean(change**2)):8.4f}, "
          f"mean of red, green, blue {tone}{seam}")


def seam_ratio(change: np.ndarray, borders: Sequence[int], patch: int) -> float:
    """Mean step of the difference across the rows of patches where tiles begin, over that at the
    other borders of patches."""
    steps = np.abs(np.diff(change, axis=0)).mean((1, 2))
    every = np.arange(1, change.shape[0] // patch)
    at_tiles = np.isin(every, borders)
    steps = steps[every * patch - 1]
    return float(steps[at_tiles].mean() / steps[~at_tiles].mean())


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command.Parser(prog="python -m benchmarks.tiles", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--input", type=Path, required=True, help="a large picture")
    parser.add_argument("--size", type=drawing_command.parse_size, required=True)
    parser.add_argument("--tile", type=command.count, required=True)
    parser.add_argument("--pit_chunks", type=command.count, default=4)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
