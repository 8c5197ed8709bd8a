"""Makes fixed evaluation batches: latents of pictures, with what they were made from.

    python -m pid_jax.fixed_batches --input photos --dst batches --codec dct --scale 4 \
        --size 512x512 --sigmas 0,0.4

`--input` takes large pictures, folders of them, and data sets packed by `pid_jax.data` (their
captions are kept). Each is cut to the size, reduced by the scale, encoded and noised.

Writes DST/NAME_sigma_0.000.npz for every picture and noise level: `latent` [1, h, w, C], `sigma`
[1], `prompt` [1], and as uint8 `lq` [1, H/scale, W/scale, 3] and `truth` [1, H, W, 3].
`pid_jax.decode --latents` reads them, and a training draws them with its samples
(`config.sample.batches`). The reference's own files become such with `python -m
tools.convert_torch_weights fix-batch`.
Exit status: 0 done, 2 bad input. Unreadable pictures of folders are named and left out.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from pid_jax import decode, drawing_command, images
from pid_jax.data import command
from pid_jax.decode_requests import Picture, UniqueNames, centre, read_pictures
from pid_jax.diffusion import degrade, noising
from pid_jax.encoders import LatentCodec, build_codec
from pid_jax.errors import UserError
from pid_jax.files import atomic_write
from pid_jax.sampling_inputs import check_sigma, seeds

SIGMAS = (0.0,)


def main(arguments: Sequence[str]) -> None:
    """Parses the command line and writes the files."""
    options = parse(arguments)
    codec = build_codec(options.codec, **dict(options.codec_option))
    check_sigma(options.sigmas)
    skipped: dict[str, str] = {}
    unique, written = UniqueNames(), 0
    for picture in read_pictures(options.input, skipped):
        name = unique(picture.name)
        for sigma, batch in batches(codec, picture, options):
            path = options.dst / f"{name}_sigma_{sigma:.3f}.npz"
            with atomic_write(path, "wb") as file:
                np.savez(file, **batch)
            caption = str(batch["prompt"][0])
            command.show(f"{path}: latent {list(batch['latent'].shape)}, {caption!r}")
            written += 1
    for name, reason in skipped.items():
        command.show(f"skipped {name}: {reason}")
    if not written:
        raise UserError("no picture could be read; name pictures or folders of them")


def batches(codec: LatentCodec, picture: Picture, options: argparse.Namespace
            ) -> Iterator[tuple[float, dict[str, np.ndarray]]]:
    """(noise level, arrays of its file) of one picture."""
    truth = cut(picture, options.size, options.scale * codec.spatial_factor)
    small = np.asarray(degrade.downsample(truth[None], options.scale))
    clean = codec.encode(small)
    noise = jax.random.normal(jax.random.key(seeds(options.seed, 1)[0]), clean.shape)
    noiser = noising.LatentNoiser(path=options.path)
    prompt = picture.caption if options.prompt is None else options.prompt
    for sigma in options.sigmas:
        latent = noiser.mix(clean, noise, np.float32([sigma])) if sigma else clean
        yield sigma, {"latent": np.asarray(latent, np.float32), "sigma": np.float32([sigma]),
                      "prompt": np.array([prompt]), "lq": images.to_uint8(small),
                      "truth": images.to_uint8(truth[None])}


def cut(picture: Picture, size: tuple[int, int] | None, multiple: int) -> np.ndarray:
    """The centre [H, W, 3] of a picture whose sides are multiples of `multiple`.

    Raises:
      UserError: a size that is none, or a picture that is smaller.
    """
    height, width = size or (side // multiple * multiple for side in picture.pixels.shape[:2])
    if height % multiple or width % multiple or not (height and width):
        raise UserError(f"{picture.source}: {height} x {width} pixels do not fit; both sides must "
                        f"be multiples of {multiple} (--scale x pixels of a latent cell)")
    return centre(picture, (height, width))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; UserError for a wrong one."""
    parser = command.Parser(prog="python -m pid_jax.fixed_batches", description=__doc__)
    parser.add_argument("--input", nargs="+", type=Path, required=True, metavar="PATH")
    parser.add_argument("--dst", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--codec", required=True, help="latent codec, such as dct or flux")
    parser.add_argument("--codec_option", action="append", default=[], type=parse_option,
                        metavar="NAME=VALUE", help="an option of the codec, such as block=2")
    parser.add_argument("--scale", type=command.count, default=4,
                        help="output pixels per pixel of the encoded picture; default 4")
    parser.add_argument("--size", type=drawing_command.parse_size, metavar="HEIGHTxWIDTH",
                        help="of the large picture, from its centre; default: as much as fits")
    parser.add_argument("--sigmas", type=decode.parse_sigmas, default=SIGMAS, metavar="S[,S...]")
    parser.add_argument("--path", choices=noising.PATHS, default="flow", help="of the noise")
    parser.add_argument("--prompt", metavar="TEXT", help="default: the picture's own caption")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    return parser.parse_args(arguments)


def parse_option(text: str) -> tuple[str, int | float | str]:
    """An argparse type: "block=2" -> ("block", 2)."""
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no option; write NAME=VALUE, such as block=2")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
