"""Looks at a packed data set: counts, sizes, buckets, captions, first keys, a contact sheet.

    python -m pid_jax.data.inspect DATASET
    python -m pid_jax.data.inspect DATASET --buckets multi --image-size 4096 --sheet sheet.png
"""

import argparse
import collections
import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from pid_jax.data import command
from pid_jax.data.buckets import Layout, assign, build_layout
from pid_jax.data.dataset import Dataset
from pid_jax.data.loading import decode_record
from pid_jax.errors import UserError
from pid_jax.files import atomic_write

THUMBNAIL, LABEL, MARGIN = 160, 14, 6


def describe(dataset: Dataset, layout: Layout, keys: int = 5) -> Iterator[str]:
    """The lines of a report on `dataset` as `layout` would show it."""
    manifest, index = dataset.manifest, dataset.index
    state = "complete" if manifest["complete"] else "INCOMPLETE: packing was interrupted"
    yield f"data set   {dataset.folder} ({state}, schema {manifest['schema']}, fingerprint "\
          f"{dataset.fingerprint[:12]})"
    yield f"pictures   {len(dataset)} in {len(manifest['shards'])} shard(s), "\
          f"{manifest['bytes'] / 1e6:.1f} MB"
    yield f"sources    {_listing(manifest['sources'])}"
    for side in ("width", "height"):
        yield f"{side:10s} {_range(getattr(index, side))} pixels"
    yield f"captions   {_listing(manifest['captions'])}; longest of each picture "\
          f"{_range(index.caption_length)} characters; without: "\
          f"{int(np.sum(index.caption_length == 0))}"
    yield f"buckets    {_listing(bucket_counts(dataset, layout))}"
    yield f"first keys {', '.join(index.key[i] for i in range(min(keys, len(dataset))))}"


def bucket_counts(dataset: Dataset, layout: Layout) -> dict[str, int]:
    """Records of each bucket by name, "too small" among them, the fullest first."""
    counts = collections.Counter()
    for size, count in collections.Counter(zip(dataset.index.width.tolist(),
                                               dataset.index.height.tolist())).items():
        bucket = assign(layout, size)
        counts[bucket.name if bucket else "too small"] += count
    return dict(counts.most_common())


def damaged_records(dataset: Dataset) -> Iterator[str]:
    """The reason for every record that cannot be read or decoded, and every altered shard."""
    for shard in dataset.manifest["shards"]:
        with open(dataset.folder / shard["file"], "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.get("sha256"):
                yield f"{shard['file']} is not the file that was packed"
    for i in range(len(dataset)):
        try:
            decode_record(dataset[i])
        except UserError as error:
            yield f"{dataset.index.key[i]}: {error}"


def contact_sheet(dataset: Dataset, count: int = 48) -> Image.Image:
    """Thumbnails of up to `count` records, evenly spaced, with key and size below each."""
    chosen = np.unique(np.linspace(0, len(dataset) - 1, min(count, len(dataset))).astype(int))
    columns = math.ceil(math.sqrt(len(chosen)))
    cell = (THUMBNAIL + MARGIN, THUMBNAIL + 2 * LABEL + MARGIN)
    rows = math.ceil(len(chosen) / columns)
    sheet = Image.new("RGB", (columns * cell[0] + MARGIN, rows * cell[1] + MARGIN), "white")
    for place, i in enumerate(chosen.tolist()):
        corner = (MARGIN + place % columns * cell[0], MARGIN + place // columns * cell[1])
        sheet.paste(_thumbnail(dataset, i), corner)
    return sheet


def _thumbnail(dataset: Dataset, i: int) -> Image.Image:
    index = dataset.index
    tile = Image.new("RGB", (THUMBNAIL, THUMBNAIL + 2 * LABEL), "white")
    try:
        tile.paste(ImageOps.contain(decode_record(dataset[i]), (THUMBNAIL, THUMBNAIL)))
        note = f"{index.width[i]} x {index.height[i]}"
    except UserError:
        note = "DAMAGED"
    draw = ImageDraw.Draw(tile)
    for line, text in enumerate((index.key[i][-26:], note)):
        draw.text((0, THUMBNAIL + line * LABEL), text.encode("ascii", "replace").decode(), "black")
    return tile


def _range(values: np.ndarray) -> str:
    return f"{values.min()} to {values.max()} (median {np.median(values):.0f})"


def _listing(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or "none"


def main(arguments: Sequence[str]) -> None:
    """Parses the command line, prints the report, writes the sheet.

    Raises: UserError for a folder that is no data set, and for damage found by --verify.
    """
    options = _parse(arguments)
    dataset = Dataset(options.folder)
    layout = build_layout(options.buckets, options.image_size, _sizes(options.sizes))
    _show(describe(dataset, layout, options.keys))
    if options.sheet:
        with atomic_write(options.sheet, "wb") as file:
            contact_sheet(dataset, options.sheet_pictures).save(file, "PNG")
        command.show(f"sheet      {options.sheet}")
    if options.verify:
        _verify(dataset)


def _verify(dataset: Dataset) -> None:
    damage = list(damaged_records(dataset))
    _show(f"damaged    {line}" for line in damage)
    if damage:
        raise UserError(f"{len(damage)} faults in {dataset.folder}; pack the data set again, or "
                        "train anyway: damaged pictures are replaced by others")
    command.show(f"verified   {len(dataset)} pictures")


def _show(lines: Iterable[str]) -> None:
    for line in lines:
        command.show(line)


def _sizes(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command.Parser(prog="python -m pid_jax.data.inspect", description=__doc__)
    parser.add_argument("folder", type=Path, help="a packed data set")
    parser.add_argument("--buckets", default="square", help="square, single, multi or custom")
    parser.add_argument("--image-size", type=int, default=256, help="see --buckets")
    parser.add_argument("--sizes", default="", help="for custom: 256x256,384x256,...")
    parser.add_argument("--keys", type=command.count, default=5, help="how many keys to list")
    parser.add_argument("--sheet", type=Path, metavar="FILE.png", help="write a contact sheet")
    parser.add_argument("--sheet-pictures", type=command.count, default=48,
                        help="pictures on the sheet")
    parser.add_argument("--verify", action="store_true", help="read and decode every picture")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
