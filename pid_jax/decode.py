"""Draws large pictures from small ones, or from latents, with a PiD checkpoint.

    python -m pid_jax.decode --checkpoint runs/pid --out drawn --input small.png
    python -m pid_jax.decode --checkpoint runs/pid --out drawn --latents latent.npz --prompt "a cat"
    python -m pid_jax.decode --checkpoint runs/pid --out drawn --input photos --ground_truth
    python -m pid_jax.decode --checkpoint runs/pid --input small.png --plan
    python -m pid_jax.decode --list

`--input` takes pictures, folders of pictures, manifests (.jsonl) and data sets packed by
`pid_jax.data` (their captions are the prompts). A picture is encoded by the codec of the
checkpoint; with `--ground_truth` it is first reduced by the checkpoint's scale, and the result is
compared with it. `--latents` takes .npy, .npz, .safetensors, the reference's fix-batch .pt and
manifests.

Writes OUT/NAME/sigma_0.000.png with a JSON beside it for every picture and noise level, what it is
compared with, sheets OUT/grid*.png (LQ bicubic | PiD | truth), the page OUT/compare.html and, with
`--ground_truth`, OUT/metrics.json. Run again, it draws what is missing or was made with other
settings. Several processes (--sequence 1) share the pictures. In a folder or data set, pictures that
cannot be read are named, counted and left out. Exit status: 0 done, 2 bad input, 1 the network's
output was not finite.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pid_jax import comparison_page, decode_outputs, decode_plan, drawing_command, releases
from pid_jax.data import command, latent_files
from pid_jax.decode_latents import latent_requests
from pid_jax.decode_outputs import DRAWN, SMALL, TRUTH, UNTRAINED, Row, Tree
from pid_jax.decode_requests import (CODEC, LQ, Request, Wishes, level_name,
                                     picture_requests)
from pid_jax.encoders.pipeline_latents import FRAMES
from pid_jax.errors import UserError
from pid_jax.inference import PixelDecoder
from pid_jax.parallel import multihost
from pid_jax.sampling_inputs import sampler_settings

PAGE = "compare.html"


def main(arguments: Sequence[str]) -> None:
    """Parses the command line, draws, and reports."""
    options = parse(arguments)
    where = {"sequence": options.sequence, "data": data_axis(options),
             "pit_chunks": options.pit_chunks}
    if options.plan:
        return show_plans(decode_plan.unloaded(options.checkpoint, options.which, options.weights,
                                               **where), options)
    decoder = PixelDecoder.from_checkpoint(options.checkpoint, options.which, options.lora_scale,
                                           **where)
    drawing_command.keep_weights(decoder, options.weights)
    untrained = (PixelDecoder.from_checkpoint(options.checkpoint, UNTRAINED, **where)
                 if options.untrained else None)
    skipped: dict[str, str] = {}
    tree = Tree(options.out, options.tree, tag(decoder, options))
    done = draw_all(decoder, untrained, tree, requests(decoder, options, skipped), options)
    if not done:
        raise UserError(f"no picture could be read: {'; '.join(map(': '.join, skipped.items()))}")
    multihost.barrier("all pictures are drawn")
    if multihost.is_writer():
        rows = [decode_outputs.read_row(tree, *place) for place in done]
        decode_outputs.write_sheets(rows, options.out, decoder.checkpoint.note())
        write_page(rows, tree)
        decode_outputs.report(rows, skipped, options.out)


def data_axis(options: argparse.Namespace) -> int:
    """Devices over which a batch is divided: as many of this process's as divide it."""
    if options.sequence > 1:
        return 1
    return math.gcd(options.batch_size, jax.local_device_count())


def requests(decoder: PixelDecoder, options: argparse.Namespace, skipped: dict[str, str]
             ) -> Iterator[Request]:
    """What the command line asks for; unreadable pictures of folders go into `skipped`."""
    wishes = Wishes(options.size, options.degrade_sigmas, options.prompt, options.seed,
                    options.frame, options.layout, options.ground_truth)
    if options.latents:
        return latent_requests(decoder, options.latents, wishes)
    return picture_requests(decoder, options.input, wishes, skipped)


def show_plans(decoder: PixelDecoder, options: argparse.Namespace) -> None:
    """Prints what each batch shape will take."""
    skipped: dict[str, str] = {}
    grids = {request.grid: None for request in requests(decoder, options, skipped)}
    channels = decoder.objective.codec.channels
    for grid in grids:
        plan = decode_plan.plan(decoder, (options.batch_size, *grid, channels), options.steps,
                                options.guidance, options.tile)
        for line in plan.lines():
            command.show(line)
    if not grids:
        raise UserError(f"no picture could be read: {'; '.join(map(': '.join, skipped.items()))}")


def draw_all(decoder: PixelDecoder, untrained: PixelDecoder | None, tree: Tree,
             wanted: Iterator[Request], options: argparse.Namespace) -> list[tuple[str, float]]:
    """Draws this process's share of what is not there yet.

    Returns:
      (name, noise level) of every picture of all processes.
    """
    shared = options.sequence == 1
    number, count = (jax.process_index(), jax.process_count()) if shared else (0, 1)
    batch: list[Request] = []
    done = []
    for index, request in enumerate(wanted):
        done.append((request.name, request.sigma))
        if index % count != number:
            continue
        if is_complete(decoder, tree, request, options):
            command.show(f"{tree.path(DRAWN, request.name, request.sigma)}: is there")
            continue
        if batch and (kind(request) != kind(batch[0]) or len(batch) == options.batch_size):
            draw_batch(decoder, untrained, tree, batch, options)
            batch = []
        batch.append(request)
    if batch:
        draw_batch(decoder, untrained, tree, batch, options)
    return done


def kind(request: Request) -> tuple:
    """Requests of one kind can be drawn together."""
    return request.grid, request.size, sorted((name, array.shape)
                                              for name, array in request.given.items())


def is_complete(decoder: PixelDecoder, tree: Tree, request: Request, options: argparse.Namespace
                ) -> bool:
    """Whether nothing is to be done, in all processes that draw this request together."""
    found = decode_outputs.complete(tree, request, decode_outputs.fingerprint(
        note_of(decoder, request, options), request, decoder.checkpoint.folder))
    return found if options.sequence == 1 else not multihost.in_any(not found)


def draw_batch(decoder: PixelDecoder, untrained: PixelDecoder | None, tree: Tree,
               batch: Sequence[Request], options: argparse.Namespace) -> None:
    """Draws requests of one kind together and writes them."""
    drawn = {DRAWN: decode(decoder, batch, options)}
    if untrained is not None:
        drawn[UNTRAINED] = decode(untrained, batch, options)
    for index, request in enumerate(batch):
        columns = {**request.baselines(decoder, options.codec),
                   **{name: pictures[index] for name, pictures in drawn.items()}}
        if request.truth is not None:
            columns[TRUTH] = request.truth
        if tree.kind == "reference" and request.small is not None:
            columns[SMALL] = request.small
        if options.sequence == 1 or multihost.is_writer():
            note = note_of(decoder, request, options)
            wanted = decode_outputs.fingerprint(note, request, decoder.checkpoint.folder)
            path = decode_outputs.write(tree, request, columns, note, wanted)
            command.show(f"{path}")


def decode(decoder: PixelDecoder, batch: Sequence[Request], options: argparse.Namespace
           ) -> np.ndarray:
    """The pictures [B, H, W, 3] of requests of one kind."""
    given = {name: np.concatenate([request.given[name] for request in batch],
                                  axis=1 if name == "step_noise" else 0)
             for name in batch[0].given}
    prompt = given.pop("embeddings", [request.prompt for request in batch])
    return decoder.decode(
        np.stack([request.latent for request in batch]), prompt,
        [request.sigma for request in batch], batch[0].size, options.steps,
        [request.seed for request in batch], guidance=options.guidance,
        negative_prompt=options.negative_prompt, tile=options.tile, **given)


def note_of(decoder: PixelDecoder, request: Request, options: argparse.Namespace
            ) -> dict[str, Any]:
    """What a picture's JSON says about how it was made."""
    channels = decoder.objective.codec.channels
    whole = decoder.output_size((*request.grid, channels))
    settings = sampler_settings(decoder.objective, *whole, options.steps, options.guidance,
                                options.negative_prompt)
    return {"input": request.source, "prompt": request.prompt, "sigma": request.sigma,
            "seed": request.seed, "latent_shape": [*request.grid, channels],
            "latent_family": decoder.objective.codec.family, **settings.note(),
            "tile": options.tile, "lora_scale": options.lora_scale, **decoder.checkpoint.note()}


def tag(decoder: PixelDecoder, options: argparse.Namespace) -> str:
    """Names checkpoint and sampler, as the reference's folders do."""
    folder, sample = decoder.checkpoint.folder, decoder.objective.config.sample
    run = folder.parents[1].name if len(folder.parents) > 1 else folder.name
    guidance = sample.guidance if options.guidance is None else options.guidance
    guidance = guidance if decoder.objective.guided else 1.0
    steps = options.steps or sample.steps
    weights = {"net": "reg"}.get(decoder.checkpoint.which, decoder.checkpoint.which)
    return (f"{decoder.objective.codec.family}_{run}_{folder.name}_cfg{guidance:g}_steps{steps}_"
            f"{weights}")


def write_page(rows: Sequence[Row], tree: Tree) -> None:
    """The page that compares every picture with what is known beside it."""
    def slider(row: Row) -> tuple[str, str] | None:
        other = next((name for name in (LQ, CODEC, TRUTH, UNTRAINED) if name in row.columns), None)
        return other and (other, DRAWN)

    shown = comparison_page.write(tree.out / PAGE, tree.tag, [
        comparison_page.Comparison(row.title, row.prompt, row.columns, slider(row))
        for row in rows])
    command.show(f"{tree.out / PAGE}: {shown} of {len(rows)} pictures")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; UserError for a wrong one."""
    parser = drawing_command.make_parser("pid_jax.decode", __doc__, out_required=False)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", nargs="+", type=Path, metavar="PATH",
                        help="pictures, folders of pictures, manifests or packed data sets")
    source.add_argument("--latents", nargs="+", type=Path, metavar="FILE",
                        help=".npy, .npz, .safetensors, fix-batch .pt or manifests; see "
                        "pid_jax.data.latent_files")
    _add_drawing_flags(parser)
    _add_memory_flags(parser)
    options = parser.parse_args(arguments)
    if options.latents and options.ground_truth:
        raise UserError("--latents have no truth to reduce: leave out --ground_truth")
    if options.frame and not options.latents:
        raise UserError("--frame belongs to --latents: pictures are noised as the network expects")
    if not options.plan and options.out is None:
        raise UserError("--out is missing: name a folder for the pictures")
    return options


def _add_drawing_flags(parser: argparse.ArgumentParser) -> None:
    """What is drawn, and what is written."""
    parser.add_argument("--list", action=ListReleases, nargs=0,
                        help="the released checkpoints and what they decode, then end")
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
    parser.add_argument("--frame", choices=FRAMES,
                        help="scale of noised --latents: flow, vp, or euler (SDXL's sampler); "
                        "default: the file's, or the network's own")
    parser.add_argument("--tree", choices=decode_outputs.TREES, default="names",
                        help="folders of the output: NAME/sigma_0.000.png, or the reference's")


def _add_memory_flags(parser: argparse.ArgumentParser) -> None:
    """How much is drawn at once."""
    parser.add_argument("--plan", action="store_true",
                        help="say what memory and FLOPs this takes, load nothing, then end")
    parser.add_argument("--batch_size", type=command.count, default=1,
                        help="pictures of one size drawn at once, over this process's devices")
    parser.add_argument("--tile", type=command.count, metavar="PIXELS",
                        help="draw by tiles of this side, to save memory")
    parser.add_argument("--pit_chunks", type=command.count, metavar="N",
                        help="parts into which the pixel blocks cut their tokens; default: config")


class ListReleases(argparse.Action):
    """Prints the registry and ends."""

    def __call__(self, parser, namespace, values, option_string=None):
        for line in releases.table():
            command.show(line)
        parser.exit()


def parse_sigmas(text: str) -> tuple[float, ...]:
    """An argparse type: "0,0.2" -> (0.0, 0.2)."""
    try:
        sigmas = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} are no noise levels; write numbers such as 0,0.2") from error
    if len({level_name(sigma) for sigma in sigmas}) < len(sigmas):
        raise argparse.ArgumentTypeError(
            f"{text!r} holds noise levels that differ by less than 0.001, which have one file name")
    return sigmas


if __name__ == "__main__":
    sys.exit(drawing_command.run(main))
