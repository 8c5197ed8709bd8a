"""Packs the real photographs that scikit-image ships, with captions of this project.

    python -m pid_jax.data.photos --dst DATASETS

writes two data sets: DATASETS/train, cut into overlapping tiles, and DATASETS/heldout, whole. No
photograph, and no other view of the same scene, is in both.
"""

import argparse
import functools
import importlib.resources
import importlib.util
import io
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from pid_jax import images
from pid_jax.data import command
from pid_jax.data.destination import staged_folder
from pid_jax.data.ingest import pack
from pid_jax.errors import UserError

SOURCE = "scikit-image"
SHARD_BYTES = 256 << 20
# Tiles overlap by at least a quarter unless a photograph has room for more than 4 on a side: one
# large photograph should not fill the data set.
OVERLAP, MOST_TILES = 0.25, 4

# file -> prompt, prompt_medium, prompt_short.
TRAIN = {
    "coffee.png": (
        "An espresso in a red-brown cup on a red-brown saucer with a spoon, on a wooden table",
        "A cup of espresso on a wooden table", "a cup of coffee"),
    "motorcycle_left.png": (
        "A red motorcycle with a black seat and a chrome engine parked on the concrete floor of a "
        "cluttered garage, seen from the side",
        "A red motorcycle parked in a garage", "a motorcycle"),
    "motorcycle_right.png": (
        "A red motorcycle standing in a garage in front of shelves full of boxes and tools, seen "
        "from slightly further right",
        "A red motorcycle in front of garage shelves", "a motorcycle"),
    "rocket.jpg": (
        "A white rocket on its launch pad at dusk between tall lattice towers, floodlit under a "
        "deep blue sky",
        "A rocket on its launch pad at dusk", "a rocket"),
    "hubble_deep_field.jpg": (
        "Thousands of distant galaxies, orange, white and blue, scattered over black space, seen "
        "by a space telescope",
        "Distant galaxies scattered over black space", "galaxies"),
    "retina.jpg": (
        "Photograph of the back of an eye: an orange-red retina with branching blood vessels and "
        "a bright optic disc on a black ground",
        "The retina of an eye with branching blood vessels", "a retina"),
    "camera.png": (
        "Black and white photograph of a man in a dark coat looking through a film camera on a "
        "tripod in a meadow, tall buildings on the horizon",
        "A man with a film camera on a tripod, black and white", "a cameraman"),
    "coins.png": (
        "Black and white photograph of four rows of ancient coins on a dark ground",
        "Rows of ancient coins, black and white", "coins"),
    "grass.png": (
        "Black and white close photograph of dry grass and small leaves that fill the picture",
        "Dry grass from above, black and white", "grass"),
    "gravel.png": (
        "Black and white close photograph of gravel, small sharp stones that fill the picture",
        "Gravel from above, black and white", "gravel"),
    "brick.png": (
        "Black and white photograph of a pavement of long bricks with pale joints, seen at a "
        "slant",
        "A brick pavement, black and white", "bricks"),
    "moon.png": (
        "Black and white photograph of the surface of the moon with craters and dark shadows",
        "The cratered surface of the moon", "the moon"),
}
HELDOUT = {
    "astronaut.png": (
        "Portrait of a smiling astronaut with short brown hair in an orange flight suit with "
        "mission patches, a flag and a model of a space shuttle behind her",
        "Portrait of a smiling astronaut in an orange flight suit", "an astronaut"),
    "chelsea.png": (
        "Close portrait of a brown tabby cat with yellow-green eyes, a pink nose and long white "
        "whiskers",
        "Portrait of a tabby cat", "a cat"),
    "ihc.png": (
        "Microscope picture of gland tissue stained brown, with blue cell nuclei in pale "
        "connective tissue between the glands",
        "Microscope picture of stained gland tissue", "stained tissue"),
}
PROMPTS = ("prompt", "prompt_medium", "prompt_short")


def photo_items(photos: dict[str, Sequence[str]], tile: int) -> Iterator[pack.Item]:
    """Items of whole photographs (`tile` 0), or of square tiles of `tile` pixels as PNG.

    A photograph with a side shorter than `tile` stays whole. Raises UserError when scikit-image is
    not installed; photographs that its version lacks are skipped by the packer.
    """
    folder = _photo_folder()
    for name, texts in photos.items():
        yield from _items_of(folder / name, dict(zip(PROMPTS, texts, strict=True)), tile)


def tile_corners(length: int, tile: int) -> list[int]:
    """Evenly spaced starts of tiles that cover `length` pixels."""
    count = min(MOST_TILES, math.ceil((length - tile) / (tile * (1 - OVERLAP))) + 1)
    return [round(i * (length - tile) / max(1, count - 1)) for i in range(count)]


def _items_of(path: Path, captions: dict[str, str], tile: int) -> Iterator[pack.Item]:
    whole = pack.Item(path.stem, path.name, path.read_bytes, captions.copy)
    if not tile or not path.is_file():
        yield whole
        return
    photo = images.decode(path.read_bytes())
    if min(photo.size) < tile:
        yield whole
        return
    for y in tile_corners(photo.height, tile):
        for x in tile_corners(photo.width, tile):
            region = photo.crop((x, y, x + tile, y + tile))
            yield pack.Item(f"{path.stem}/x{x:04d}_y{y:04d}", path.name,
                            functools.partial(_png, region), captions.copy)


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _photo_folder() -> Path:
    if importlib.util.find_spec("skimage") is None:
        raise UserError("the photographs come with scikit-image, which is not installed; install "
                        "it with `pip install scikit-image`")
    return Path(str(importlib.resources.files("skimage.data")))


def main(arguments: Sequence[str]) -> None:
    """Parses the command line and packs both data sets."""
    options = _parse(arguments)
    with staged_folder(options.dst, options.overwrite) as stage:
        summaries = {
            "train": pack.pack(photo_items(TRAIN, options.tile), stage / "train", SOURCE,
                               SHARD_BYTES),
            "heldout": pack.pack(photo_items(HELDOUT, 0), stage / "heldout", SOURCE, SHARD_BYTES)}
    for name, summary in summaries.items():
        for line in summary.lines(options.dst / name):
            command.show(line)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command.Parser(prog="python -m pid_jax.data.photos", description=__doc__)
    parser.add_argument("--dst", type=Path, required=True, help="folder for both data sets")
    parser.add_argument("--tile", type=int, default=256, metavar="PIXELS",
                        help="side of the training tiles; 0 packs whole photographs")
    parser.add_argument("--overwrite", action="store_true",
                        help="replace the data sets at --dst, once the new ones are complete")
    options = parser.parse_args(arguments)
    if options.tile and not 16 <= options.tile <= 4096:
        raise UserError(f"--tile is {options.tile}; expected 0, or 16 to 4096 pixels")
    return options


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
