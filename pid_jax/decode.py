"""Draws large pictures from small ones, or from latents, with a PiD checkpoint.

    python -m pid_jax.decode --checkpoint runs/pid --out drawn --input small.png
    python -m pid_jax.decode --checkpoint runs/pid --out drawn --latents latent.npz --prompt "a cat"
    python -m pid_jax.decode --checkpoint runs/pid --out drawn --input photos --ground_truth

`--input` takes pictures, folders of pictures, and data sets packed by `pid_jax.data` (their
captions are the prompts). A picture is encoded by the codec of the checkpoint; with
`--ground_truth` it is first reduced by the checkpoint's scale, and the result is compared with it.

Writes OUT/NAME/sigma_0.000.png with a JSON beside it for every picture and noise level, sheets
OUT/grid*.png (LQ bicubic | PiD | truth) and, with `--ground_truth`, OUT/metrics.json. Exit status:
0 done, 2 bad input, 1 the network's output was not finite. In a folder or data set, pictures that
cannot be read are named, counted and left out.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from pid_jax import drawing_command
from pid_jax.data import command, latent_files
from pid_jax.decode_requests import Request, codec_picture, latent_requests, picture_requests
from pid_jax.errors import UserError
from pid_jax.evaluation.picture_scores import compare
from pid_jax.inference import PixelDecoder
from pid_jax.sampling_inputs import sampler_settings

CODEC, DRAWN, UNTRAINED, TRUTH = "codec_bicubic", "pid", "untrained", "truth"


@dataclasses.dataclass(frozen=True)
class Row:
    """One drawn picture: its name, noise level, and named pictures [H, W, 3] for the sheet."""

    name: str
    sigma: float
    columns: Mapping[str, np.ndarray]

    def scores(self) -> dict[str, dict[str, float]]:
        """PSNR (dB), SSIM and CIEDE2000 of every column against the truth; empty without one."""
        if TRUTH not in self.columns:
            return {}
        truth = self.columns[TRUTH][None]
        return {name: {metric: round(value, 4)
                       for metric, value in compare(picture[None], truth).items()}
                for name, picture in self.columns.items() if name != TRUTH}


def main(arguments: Sequence[str]) -> None:
    """Parses the command line, draws, and reports."""
    options = parse(arguments)
    decoder = PixelDecoder.from_checkpoint(options.checkpoint, options.which, options.lora_scale,
                                           options.sequence)
    untrained = (PixelDecoder.from_checkpoint(options.checkpoint, UNTRAINED,
                                              sequence=options.sequence)
                 if options.untrained else None)
    skipped: dict[str, str] = {}
    rows = []
    for request in requests(decoder, options, skipped):
        row = draw(decoder, untrained, request, options)
        command.show(f"{write_row(decoder, row, request, options)}")
        rows.append(row)
    if not rows:
        raise UserError(f"no picture could be read: {'; '.join(map(': '.join, skipped.items()))}")
    write_sheets(decoder, rows, options.out)
    report(rows, skipped, options.out)


def requests(decoder: PixelDecoder, options: argparse.Namespace, skipped: dict[str, str]
             ) -> Iterator[Request]:
    """What the command line asks for; unreadable pictures of folders go into `skipped`."""
    if options.latents:
        return latent_requests(decoder, options.latents, options.layout, options.degrade_sigmas,
                               options.prompt)
    return picture_requests(decoder, options.input, options.ground_truth, options.size,
                            options.degrade_sigmas, options.prompt, options.seed, skipped)


def draw(decoder: PixelDecoder, untrained: PixelDecoder | None, request: Request,
         options: argparse.Namespace) -> Row:
    """Decodes one request, and again with untrained weights where they are given."""
    def decode(with_decoder: PixelDecoder) -> np.ndarray:
        picture = with_decoder.decode(
            request.latent[None], request.prompt, request.sigma, request.size, options.steps,
            options.seed, guidance=options.guidance, negative_prompt=options.negative_prompt)[0]
        return picture

    columns = {CODEC: codec_column(decoder, request)} if options.codec else {}
    if request.baseline is not None:
        columns[request.baseline_name] = request.baseline
    columns[DRAWN] = decode(decoder)
    if untrained is not None:
        columns[UNTRAINED] = decode(untrained)
    if request.truth is not None:
        columns[TRUTH] = request.truth
    return Row(request.name, request.sigma, columns)


def codec_column(decoder: PixelDecoder, request: Request) -> np.ndarray:
    """The codec's own decode of the request's latent, enlarged."""
    picture = codec_picture(decoder.objective.codec, request.latent,
                            decoder.output_size(request.latent.shape))
    if picture is None:
        raise UserError("--codec needs the weights of the codec's decoder, which are not there; "
                        "leave it out")
    return picture[:request.size[0], :request.size[1]]


def write_row(decoder: PixelDecoder, row: Row, request: Request, options: argparse.Namespace
              ) -> Path:
    """Writes the drawn picture and its JSON; returns the picture's path."""
    height, width = decoder.output_size(request.latent.shape)
    settings = sampler_settings(decoder.objective, height, width, options.steps,
                                          options.guidance, options.negative_prompt)
    path = options.out / row.name / file_name(row.sigma)
    drawing_command.write_picture(path, row.columns[DRAWN], {
        "input": request.source, "prompt": request.prompt, "sigma": row.sigma,
        "seed": options.seed, "latent_shape": list(request.latent.shape),
        "latent_family": decoder.objective.codec.family, **settings.note(),
        "scores": row.scores(), **decoder.checkpoint.note()})
    return path


def file_name(sigma: float) -> str:
    """What the picture of a noise level is called."""
    return f"sigma_{sigma:.3f}.png"


def write_sheets(decoder: PixelDecoder, rows: Sequence[Row], out: Path) -> None:
    """One sheet per picture size: `grid.png` when all are of one size, else `grid_HxW.png`."""
    by_size: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        by_size.setdefault(row.columns[DRAWN].shape[:2], []).append(row)
    for (height, width), group in by_size.items():
        name = "grid.png" if len(by_size) == 1 else f"grid_{height}x{width}.png"
        drawing_command.write_grid(
            out / name, [row.columns for row in group],
            [f"{row.name} sigma {row.sigma:.3f}" for row in group], decoder.checkpoint.note())
        command.show(f"{out / name}: {' | '.join(group[0].columns)}")


def report(rows: Sequence[Row], skipped: Mapping[str, str], out: Path) -> None:
    """Prints the table of scores, writes `metrics.json`, and names what was left out."""
    scored = [(row, row.scores()) for row in rows]
    if scored[0][1]:
        means = {f"{sigma:.3f}": mean_scores([s for row, s in scored if row.sigma == sigma])
                 for sigma in sorted({row.sigma for row in rows})}
        for line in table(scored, means):
            command.show(line)
        drawing_command.write_json(out / "metrics.json", {
            "pictures": [{"picture": row.name, "sigma": row.sigma, **s} for row, s in scored],
            "mean_by_sigma": means})
    for name, reason in skipped.items():
        command.show(f"skipped {name}: {reason}")
    command.show(f"{len(rows)} drawn, {len(skipped)} skipped; in {out}")


def mean_scores(scores: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Means over pictures of scores by column and metric."""
    return {column: {metric: float(np.mean([s[column][metric] for s in scores]))
                     for metric in scores[0][column]} for column in scores[0]}


def table(scored: Sequence[tuple[Row, Mapping]], means: Mapping[str, Mapping]) -> Iterator[str]:
    """Lines of a table: a picture a row, PSNR and SSIM of every column."""
    columns = list(scored[0][1])
    entries = [(f"{row.name} sigma {row.sigma:.3f}", s) for row, s in scored]
    entries += [(f"mean sigma {sigma}", s) for sigma, s in means.items()]
    width = max(len(name) for name, _ in entries)
    yield " " * width + "".join(f"  {column:>17}" for column in columns)
    yield f"{'PSNR dB / SSIM':<{width}}"
    for name, scores in entries:
        yield f"{name:<{width}}" + "".join(
            f"  {scores[c]['psnr']:>9.2f} / {scores[c]['ssim']:.3f}" for c in columns)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; UserError for a wrong one."""
    parser = drawing_command.make_parser("pid_jax.decode", __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", nargs="+", type=Path, metavar="PATH",
                        help="pictures, folders of pictures, or packed data sets")
    source.add_argument("--latents", nargs="+", type=Path, metavar="FILE",
                        help=".npy, .npz or .safetensors; see pid_jax.data.latent_files")
    parser.add_argument("--ground_truth", action="store_true",
                        help="reduce each input first, and compare the result with it")
    parser.add_argument("--codec", action="store_true",
                        help="also show what the codec's own decoder makes of the latents")
    parser.add_argument("--untrained", action="store_true",
                        help="also draw with the weights before training")
    parser.add_argument("--size", type=drawing_command.parse_size, metavar="HEIGHTxWIDTH",
                        help="of the drawn picture, from the input's centre; default: all of it")
    parser.add_argument("--degrade_sigmas", type=parse_sigmas, metavar="S[,S...]",
                        help="noise levels in [0, 1]: added to encoded pictures; for --latents, "
                        "the level that they already have. Default: 0, or the latent file's")
    parser.add_argument("--prompt", metavar="TEXT",
                        help="default: the input's own caption, or none")
    parser.add_argument("--layout", default="auto", choices=latent_files.LAYOUTS,
                        help="order of the axes of --latents")
    options = parser.parse_args(arguments)
    if options.latents and (options.ground_truth or options.size):
        raise UserError("--latents says the size itself and has no truth: leave out --size and "
                        "--ground_truth")
    return options


def parse_sigmas(text: str) -> tuple[float, ...]:
    """An argparse type: "0,0.2" -> (0.0, 0.2)."""
    try:
        sigmas = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} are no noise levels; write numbers such as 0,0.2") from error
    if len({file_name(sigma) for sigma in sigmas}) < len(sigmas):
        raise argparse.ArgumentTypeError(
            f"{text!r} holds noise levels that differ by less than 0.001, which have one file name")
    return sigmas


if __name__ == "__main__":
    sys.exit(drawing_command.run(main))
