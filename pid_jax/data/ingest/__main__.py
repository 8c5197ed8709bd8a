"""Packs a folder of pictures with captions into ArrayRecord shards.

    python -m pid_jax.data.ingest --src PICTURES --dst DATASET
    python -m pid_jax.data.ingest --src PICTURES --dst DATASET --captions captions.jsonl

The captions of a/b.jpg are in a/b.json or a/b.txt beside it, or in a row of the --captions table
(.jsonl or .csv) whose file_name is a/b.jpg. A .json file or a row holds `caption`, or any of
`prompt`, `prompt_medium` and `prompt_short`. Pictures that cannot be packed are skipped and named
in DATASET/skipped.jsonl.

Pictures with a class (ImageNet):

    python -m pid_jax.data.ingest --src ILSVRC2012/train --dst DATASET --labels folders \
        --center-crop 256
    python -m pid_jax.data.ingest --tfds imagenet2012 --dst DATASET --center-crop 256
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pid_jax.data import command
from pid_jax.data.ingest import folder, labelled, pack


def main(arguments: Sequence[str]) -> None:
    """Parses the command line and packs. Raises UserError for anything a person can mend."""
    options = _parse(arguments)
    items = _items(options)
    with pack.destination(options.dst, options.overwrite) as target:
        summary = pack.pack(items, target, options.source or _source_name(options),
                            int(options.shard_size_mb * (1 << 20)), options.min_side)
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
        items = folder.folder_items(options.src, options.captions, options.missing_captions)
    return labelled.cropped(items, options.center_crop) if options.center_crop else items


def _source_name(options: argparse.Namespace) -> str:
    return options.tfds or options.src.resolve().name


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command.Parser(prog="python -m pid_jax.data.ingest", description=__doc__)
    parser.add_argument("--src", type=Path,
                        help="folder of pictures (with --tfds: its data_dir)")
    parser.add_argument("--labels", choices=("folders",),
                        help="the caption `label` is the number of the picture's top folder")
    parser.add_argument("--tfds", metavar="NAME",
                        help="labelled pictures of a prepared TFDS set, such as imagenet2012")
    parser.add_argument("--split", default="train", help="split of --tfds")
    parser.add_argument("--center-crop", type=command.count, metavar="PIXELS",
                        help="cut squares as ADM does and pack them as PNG")
    parser.add_argument("--dst", type=Path, required=True, help="folder for the data set")
    parser.add_argument("--captions", type=Path, help="table of captions, .jsonl or .csv")
    parser.add_argument("--missing-captions", choices=folder.MISSING, default="skip",
                        help="pictures without caption: skip them, or pack them with none")
    parser.add_argument("--source", help="name of the collection (default: the folder's)")
    parser.add_argument("--min-side", type=int, default=1, metavar="PIXELS",
                        help="skip pictures whose shorter side is below this")
    parser.add_argument("--shard-size-mb", type=command.positive, default=256,
                        help="start a new shard after this many MiB")
    parser.add_argument("--overwrite", action="store_true",
                        help="replace the data set at --dst, once the new one is complete")
    options = parser.parse_args(arguments)
    if not (options.src or options.tfds):
        parser.error("--src is missing: name a folder of pictures, or a set with --tfds")
    return options


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
