"""Packs a collection of pictures with captions into ArrayRecord shards.

    python -m pid_jax.data.ingest --src PICTURES --dst DATASET
    python -m pid_jax.data.ingest --src PICTURES --dst DATASET --captions captions.jsonl
    python -m pid_jax.data.ingest --format webdataset --src TARS --dst DATASET
    python -m pid_jax.data.ingest --format list --src list.jsonl --dst DATASET
    python -m pid_jax.data.ingest --format multiaspect --src METADATA --images DIR --dst DATASET

folder: the captions of a/b.jpg are in a/b.json or a/b.txt beside it, or in a row of the --captions
table (.jsonl, .csv or .parquet) whose file_name is a/b.jpg. A .json file or a row holds `caption`,
or any of `prompt`, `prompt_medium` and `prompt_short`.
webdataset: single tars, or pairs of image/ and caption/ tars, to any depth.
list: a .jsonl, .csv or .parquet table with file_name and captions, such as the downloads.jsonl
of pid_jax.data.download; files are relative to --images, or else to the table.
multiaspect: MultiAspect-4K-1M's JSON metadata, with its downloaded pictures in --images.

What cannot be packed is skipped and named in DATASET/skipped.jsonl. Run again, the command goes
on where it stopped, and adds what is new.

Pictures with a class (ImageNet):

    python -m pid_jax.data.ingest --src ILSVRC2012/train --dst DATASET --labels folders \
        --center-crop 256
    python -m pid_jax.data.ingest --tfds imagenet2012 --dst DATASET --center-crop 256
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pid_jax.data import command
from pid_jax.data.destination import destination
from pid_jax.data.ingest import folder, labelled, listed, pack, webdataset

FORMATS = ("folder", "webdataset", "list", "multiaspect")


def main(arguments: Sequence[str]) -> None:
    """Parses the command line and packs. Raises UserError for anything a person can mend."""
    options = _parse(arguments)
    items = _items(options)
    source = options.source or _source_name(options)
    with destination(options.dst, options.overwrite) as target:
        summary = pack.pack(items, target, source, int(options.shard_size_mb * (1 << 20)),
                            options.min_side, options.workers, options.strict,
                            _recipe(options, source))
    for line in summary.lines(options.dst):
        command.show(line)


def _items(options: argparse.Namespace) -> Iterable[pack.Item | pack.Skip]:
    if options.tfds:
        items = labelled.tfds_items(options.tfds, options.split, options.src)
    elif options.labels:
        classes = labelled.class_folders(options.src)
        command.show(f"{len(classes)} classes: {classes[0]} is 0, {classes[-1]} is "
                     f"{len(classes) - 1}")
        items = labelled.with_folder_labels(
            folder.folder_items(options.src, options.captions, "empty"), classes)
    else:
        items = _captioned_items(options)
    if options.center_crop:
        return labelled.cropped(items, options.center_crop, options.min_side)
    return items


def _captioned_items(options: argparse.Namespace) -> Iterable[pack.Item | pack.Skip]:
    source, missing = options.src, options.missing_captions
    if options.format == "webdataset":
        return webdataset.webdataset_items(source, missing)
    if options.format == "list":
        return listed.listed_items(source, options.images, missing)
    if options.format == "multiaspect":
        return listed.multiaspect_items(source, options.images, missing)
    return folder.folder_items(source, options.captions, missing)


def _recipe(options: argparse.Namespace, source: str) -> dict[str, object]:
    """What a data set must have been packed with to be continued."""
    kind = "tfds" if options.tfds else options.format
    labels = labelled.numbering(labelled.class_folders(options.src)) if options.labels else ""
    return {"kind": kind, "source": source, "labels": labels,
            "center_crop": options.center_crop or 0, "min_side": options.min_side,
            "missing_captions": options.missing_captions}


def _source_name(options: argparse.Namespace) -> str:
    return options.tfds or options.src.resolve().name


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command.Parser(prog="python -m pid_jax.data.ingest", description=__doc__)
    parser.add_argument("--src", type=Path,
                        help="the collection (with --tfds: its data_dir)")
    parser.add_argument("--format", choices=FORMATS, default="folder", help="what --src is")
    parser.add_argument("--images", type=Path, metavar="DIR",
                        help="folder of the pictures of a list or of multiaspect")
    parser.add_argument("--labels", choices=("folders",),
                        help="the caption `label` is the number of the picture's top folder")
    parser.add_argument("--tfds", metavar="NAME",
                        help="labelled pictures of a prepared TFDS set, such as imagenet2012")
    parser.add_argument("--split", default="train", help="split of --tfds")
    parser.add_argument("--center-crop", type=command.count, metavar="PIXELS",
                        help="cut squares as ADM does and pack them as PNG")
    parser.add_argument("--dst", type=Path, required=True, help="folder for the data set")
    parser.add_argument("--captions", type=Path, help="table of captions of a folder")
    parser.add_argument("--missing-captions", choices=folder.MISSING, default="skip",
                        help="pictures without caption: skip them, or pack them with none")
    parser.add_argument("--source", help="name of the collection (default: the folder's)")
    parser.add_argument("--min-side", type=int, default=1, metavar="PIXELS",
                        help="skip pictures whose shorter side is below this")
    parser.add_argument("--shard-size-mb", type=command.positive, default=256,
                        help="start a new shard after this many MiB")
    parser.add_argument("--workers", type=command.count, default=len(os.sched_getaffinity(0)),
                        help="threads that read and decode (default: processors); the data set "
                        "is the same for every number")
    parser.add_argument("--strict", action="store_true",
                        help="end at the first item that cannot be packed")
    parser.add_argument("--overwrite", action="store_true",
                        help="replace the data set at --dst, once the new one is complete")
    options = parser.parse_args(arguments)
    if not (options.src or options.tfds):
        parser.error("--src is missing: name a folder of pictures, or a set with --tfds")
    if options.labels and (options.tfds or options.format != "folder"):
        parser.error("--labels folders numbers the folders of --src: leave out --tfds and --format")
    if options.format == "multiaspect" and not options.images:
        parser.error("--images is missing: name the folder of the downloaded pictures")
    return options


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
