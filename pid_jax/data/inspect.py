"""Looks at a packed data set: counts, sizes, buckets, captions, first keys, pictures of them.

    python -m pid_jax.data.inspect DATASET
    python -m pid_jax.data.inspect DATASET --buckets multi --image-size 4096 --sheet sheet.png \
        --histograms histograms.png
    python -m pid_jax.data.inspect DATASET --verify
"""

import argparse
import collections
import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from pid_jax.data import command, histograms
from pid_jax.data.buckets import Layout, assign, build_layout
from pid_jax.data.dataset import Dataset, fingerprint
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
          f"{manifest['bytes'] / 1e6:.1f} MB; "\
          f"{manifest.get('skipped', 0)} skipped while packing"
    yield f"sources    {_listing(manifest['sources'])}"
    for side in ("width", "height"):
        yield f"{side:10s} {_range(getattr(index, side))} pixels"
    yield f"captions   {_listing(manifest['captions'])}; longest of each picture "\
          f"{_range(index.caption_length)} characters; without: "\
          f"{int(np.sum(index.caption_length == 0))}"
    yield f"ratios     {_listing(_ratio_counts(dataset))}"
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


def _ratio_counts(dataset: Dataset) -> dict[str, int]:
    """Records of each aspect ratio, the most frequent first."""
    counts = sorted(dataset.index.bucket_counts().items(), key=lambda pair: -pair[1])
    return {name.replace(",", ":"): count for name, count in counts}


def faults(dataset: Dataset) -> Iterator[str]:
    """What is not as the manifest says: altered shards and indices, unreadable records, counts."""
    yield from _altered_files(dataset)
    sources, captions = collections.Counter(), collections.Counter()
    unreadable = 0
    for i, listed in enumerate(dataset.captions()):
        try:
            record = dataset[i]
            decode_record(record)
        except UserError as error:
            unreadable += 1
            yield f"{dataset.index.key[i]}: {error}"
        else:
            sources[record.source] += 1
            captions.update(record.captions.keys())
            if listed != record.captions:
                yield f"{record.key}: its captions are not those that the index lists"
    if not unreadable:
        yield from _miscounts(dataset, sources, captions)


def _miscounts(dataset: Dataset, sources: Mapping[str, int], captions: Mapping[str, int]
               ) -> Iterator[str]:
    manifest, index = dataset.manifest, dataset.index
    found = {"records": len(index), "bytes": int(index.size.sum()), "sources": sources,
             "captions": captions, "buckets": index.bucket_counts()}
    for name, value in found.items():
        if name in manifest and manifest[name] != value:
            counted = dict(value) if isinstance(value, Mapping) else value
            yield f"the manifest says {name} {manifest[name]}, there are {counted}"


def _altered_files(dataset: Dataset) -> Iterator[str]:
    for shard in dataset.manifest["shards"]:
        with open(dataset.folder / shard["file"], "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.get("sha256"):
                yield f"{shard['file']} is not the file that was packed"
    if fingerprint(dataset.index) != dataset.fingerprint and "recipe" in dataset.manifest:
        yield "the indices are not those that were packed"


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
    if options.histograms:
        histograms.draw(dataset.index, bucket_counts(dataset, layout), options.histograms)
        command.show(f"histograms {options.histograms}")
    if options.verify:
        _verify(dataset)


def _verify(dataset: Dataset) -> None:
    damage = list(faults(dataset))
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
    parser.add_argument("--histograms", type=Path, metavar="FILE.png",
                        help="draw sizes, aspect ratios, buckets and caption lengths")
    parser.add_argument("--verify", action="store_true",
                        help="read and decode every picture, compare with the manifest")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
