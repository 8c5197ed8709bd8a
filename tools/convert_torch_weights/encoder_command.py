"""The sub-command `encoder`: published weights of a frozen encoder to a folder."""

import argparse
import time
from pathlib import Path

from tools.convert_torch_weights.encoder_convert import (CONVERTERS, KEPT, EncoderRequest,
                                                         convert_encoder)

HELP = "weights of a frozen encoder (latent codec or text) to a folder"
PARTS = {"decoder": "dinov2, siglip: file with the decoder of the latents",
         "stats": "dinov2: file with the latents' mean and variance",
         "decoder_config": "siglip: JSON with the decoder's sizes",
         "tokenizer": "gemma2: tokenizer.json or tokenizer.model; default: beside --src"}


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the sub-command's arguments."""
    parser.set_defaults(run=_run)
    parser.add_argument("--name", required=True, choices=sorted(CONVERTERS))
    parser.add_argument("--src", required=True, help="weight file or folder")
    parser.add_argument("--dst", required=True, type=Path,
                        help="folder to make; weights/NAME is found without being named")
    for part, text in PARTS.items():
        parser.add_argument(f"--{part}", help=text)
    parser.add_argument("--dtype", choices=KEPT, help="default: that of the source")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier conversion")


def _run(arguments: argparse.Namespace) -> None:
    sources = {"model": arguments.src} | {
        part: path for part in PARTS if (path := getattr(arguments, part))}
    started = time.monotonic()
    card = convert_encoder(EncoderRequest(arguments.name, sources, arguments.dst,
                                          arguments.dtype, arguments.overwrite))
    print(f"{arguments.dst}: {card['what']}, {card['parameters']:,} parameters in "
          f"{', '.join(card['dtype'])}, {time.monotonic() - started:.1f} s")
    print(f"weights: {card['licence']['weights']}")
