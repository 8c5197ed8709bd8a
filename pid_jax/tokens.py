"""Pictures to tokens and back from the shell, with a DiTok or a converted TiTok checkpoint.

    python -m pid_jax.tokens encode --checkpoint DIR --input photo.jpg --out tokens
    python -m pid_jax.tokens decode --checkpoint DIR --input tokens --out drawn
    python -m pid_jax.tokens cache --checkpoint DIR --data runs/photos/train --out cache.npz
    python -m pid_jax.tokens bpp --tokens 32 --codebook 4096 --size 256

`encode` takes the square centre of each picture and writes NAME.tok: 16 bytes of header and 48
bytes of tokens (32 of a codebook of 4096). `decode` draws NAME.png from it. `cache` encodes a
packed data set once, for training with config.ditok.token_cache. `bpp` says what tokens cost.
Exit status: 0 done, 2 bad input, 1 the network's output was not finite.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from pid_jax import images, pictures
from pid_jax.data import command, token_files
from pid_jax.data.dataset import Dataset
from pid_jax.data.geometry import adm_crop
from pid_jax.data.loading import decode_record
from pid_jax.data.token_cache import TokenCache
from pid_jax.errors import UserError
from pid_jax.evaluation import codebook
from pid_jax.tokenizer import Tokenizer, load_tokenizer

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".avif")


def main(arguments: Sequence[str]) -> None:
    """Parses the command line and runs one sub-command."""
    options = parse(arguments)
    options.run(options)


def encode(options: argparse.Namespace) -> None:
    """Pictures to token files."""
    tokenizer = load_tokenizer(options.checkpoint, options.which)
    for path in files_of(options.input, PICTURES):
        picture = square(read_picture(path), tokenizer.side)
        indices = tokenizer.encode(picture[None])[0]
        target = options.out / f"{path.stem}{token_files.ENDING}"
        size = token_files.write(target, indices, tokenizer.codebook_size, tokenizer.fingerprint)
        command.show(f"{target}: {len(indices)} tokens, {size} bytes, {bpp_line(tokenizer)}")


def decode(options: argparse.Namespace) -> None:
    """Token files to pictures."""
    tokenizer = load_tokenizer(options.checkpoint, options.which)
    given = {name: getattr(options, name) for name in ("label", "steps", "guidance")}
    given = {name: value for name, value in given.items() if value is not None}
    for path in files_of(options.input, (token_files.ENDING,)):
        indices = token_files.from_bytes(path.read_bytes(), tokenizer.codebook_size,
                                         tokenizer.fingerprint, str(path))
        picture = tokenizer.decode(indices[None], options.seed, **given)[0]
        target = options.out / f"{path.stem}.png"
        pictures.save_png(target, images.to_uint8(picture))
        command.show(f"{target}: {tokenizer.side} x {tokenizer.side} pixels")


def cache(options: argparse.Namespace) -> None:
    """Encodes a packed data set."""
    tokenizer = load_tokenizer(options.checkpoint, options.which)
    dataset = Dataset(options.data)
    parts = [tokenizer.encode(batch)
             for batch in record_batches(dataset, tokenizer.side, options.batch)]
    found = TokenCache(np.concatenate(parts), dataset.fingerprint, tokenizer.side, "adm",
                       tokenizer.fingerprint)
    found.save(options.out)
    counts = codebook.histogram(found.indices, tokenizer.codebook_size)
    command.show(f"{options.out}: {len(found.indices)} pictures, entropy "
                 f"{codebook.entropy(counts):.3f} bits, usage {codebook.usage(counts):.4f}")


def compute_bpp(options: argparse.Namespace) -> None:
    """Bits a pixel of tokens of a fixed number of bits."""
    side, value = options.size, codebook.fixed_bpp(options.tokens, options.codebook, options.size,
                                                   options.size)
    command.show(f"{options.tokens} tokens x {np.log2(options.codebook):g} bits / ({side} x {side} "
                 f"pixels) = {value:.6f} bits per pixel")


def bpp_line(tokenizer: Tokenizer) -> str:
    """What the tokens of a picture cost."""
    value = codebook.fixed_bpp(tokenizer.tokens, tokenizer.codebook_size, tokenizer.side,
                               tokenizer.side)
    return f"{value:.6f} bits per pixel"


def read_picture(path: Path) -> Image.Image:
    """A picture file; UserError with its name when it is damaged or none."""
    try:
        return images.decode(path.read_bytes())
    except UserError as error:
        raise UserError(f"the picture {path} cannot be read: {error}") from error


def square(picture: Image.Image, side: int) -> np.ndarray:
    """The square centre of a PIL picture, float32 [side, side, 3] in [-1, 1]."""
    return images.to_float(np.asarray(adm_crop(picture, side)))


def record_batches(dataset: Dataset, side: int, batch: int) -> Iterator[np.ndarray]:
    """All pictures of a data set in order, float32 [<= batch, side, side, 3]."""
    for start in range(0, len(dataset), batch):
        records = (dataset[i] for i in range(start, min(start + batch, len(dataset))))
        yield np.stack([square(decode_record(record), side) for record in records])


def files_of(inputs: Sequence[Path], endings: tuple[str, ...]) -> list[Path]:
    """Named files, and those in named folders that have one of the endings."""
    found = []
    for path in inputs:
        if not path.exists():
            raise UserError(f"--input {path} does not exist")
        inside = sorted(p for p in path.iterdir() if p.suffix.lower() in endings) \
            if path.is_dir() else [path]
        if not inside:
            raise UserError(f"--input {path} holds no file that ends in {', '.join(endings)}")
        found += inside
    if len({path.stem for path in found}) < len(found):
        raise UserError("two inputs have the same name, so their outputs would too; rename one")
    return found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; UserError for a wrong one."""
    parser = command.Parser(prog="python -m pid_jax.tokens", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="{encode,decode,cache,bpp}")
    for name, run in (("encode", encode), ("decode", decode), ("cache", cache)):
        _add_common(commands.add_parser(name, help=run.__doc__), name, run)
    bpp = commands.add_parser("bpp", help=compute_bpp.__doc__)
    bpp.set_defaults(run=compute_bpp)
    for name, default in (("tokens", 32), ("codebook", 4096), ("size", 256)):
        bpp.add_argument(f"--{name}", type=command.count, default=default)
    return parser.parse_args(arguments)


def _add_common(parser: argparse.ArgumentParser, name: str, run) -> None:
    parser.set_defaults(run=run)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--which", default="ema", metavar="WEIGHTS",
                        help="ema (or another average by its name), net or untrained")
    parser.add_argument("--out", type=Path, required=True,
                        help="a file for cache, a folder for the others")
    if name == "cache":
        parser.add_argument("--data", type=Path, required=True, help="a packed data set")
        parser.add_argument("--batch", type=command.count, default=32)
        return
    parser.add_argument("--input", nargs="+", type=Path, required=True, metavar="PATH")
    if name == "decode":
        parser.add_argument("--seed", type=int, default=0, help="of the noise")
        parser.add_argument("--label", type=int, help="class of the pictures; default: none")
        parser.add_argument("--steps", type=command.count, help="default: as the run's samples")
        parser.add_argument("--guidance", type=float, help="on the label; default: the run's")


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
