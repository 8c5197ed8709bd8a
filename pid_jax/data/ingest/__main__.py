"""Packs a folder of pictures with captions into ArrayRecord shards.

    python -m pid_jax.data.ingest --src PICTURES --dst DATASET
    python -m pid_jax.data.ingest --src PICTURES --dst DATASET --captions captions.jsonl

The captions of a/b.jpg are in a/b.json or a/b.txt beside it, or in a row of the --captions table
(.jsonl or .csv) whose file_name is a/b.jpg. A .json file or a row holds `caption`, or any of
`prompt`, `prompt_medium` and `prompt_short`. Pictures that cannot be packed are skipped and named
in DATASET/skipped.jsonl.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pid_jax.data import command
from pid_jax.data.ingest import folder, pack


def main(arguments: Sequence[str]) -> None:
    """Parses the command line and packs. Raises UserError for anything a person can mend."""
    options = _parse(arguments)
    items = folder.folder_items(options.src, options.captions, options.missing_captions)
    with pack.destination(options.dst, options.overwrite) as target:
        summary = pack.pack(items, target, options.source or options.src.resolve().name,
                            int(options.shard_size_mb * (1 << 20)), options.min_side)
    for line in summary.lines(options.dst):
        command.show(line)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command.Parser(prog="python -m pid_jax.data.ingest", description=__doc__)
    parser.add_argument("--src", type=Path, required=True, help="folder of pictures")
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
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
