"""Draws pictures from prompts or of classes.

    python -m pid_jax.generate --checkpoint runs/pixeldit --out drawn --prompts "a cat" "a rocket"
    python -m pid_jax.generate --checkpoint runs/digits/run --out drawn --classes 0-9

Writes OUT/000.png, 001.png, ... with a JSON beside each, and OUT/grid.png. With several sizes every
prompt is drawn in each: OUT/000_256x384.png, OUT/grid_256x384.png. Exit status: 0 all pictures are
written, 2 bad input, 1 the network's output was not finite.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pid_jax import drawing_command
from pid_jax.class_inference import ClassGenerator, parse_classes, sampler_note
from pid_jax.data import command
from pid_jax.errors import UserError
from pid_jax.inference import PixelGenerator
from pid_jax.sampling_inputs import SOLVERS, padded, sampler_settings
from pid_jax.sampling_inputs import seeds as check_seeds

Size = tuple[int, int]


def main(arguments: Sequence[str]) -> None:
    """Parses the command line and draws."""
    options = parse(arguments)
    if options.classes is not None:
        prompts = parse_classes(options.classes)
        generator, draw = ClassGenerator, draw_classes
    else:
        prompts, generator, draw = read_prompts(options), PixelGenerator, draw_all
    seeds = seeds_of(options, len(prompts))
    where = {} if options.sequence == 1 else {"sequence": options.sequence}
    generator = generator.from_checkpoint(options.checkpoint, options.which,
                                          options.lora_scale, **where)
    if options.classes is None:
        for size in options.size or ():
            generator.objective.check_picture(*padded(size, generator.objective.net.patch_size))
    drawing_command.keep_weights(generator, options.weights)
    for size in options.size or [None]:
        ending = "" if len(options.size or ()) < 2 else f"_{size[0]}x{size[1]}"
        drawn = []
        for number, (picture, note) in enumerate(draw(generator, prompts, seeds, size, options)):
            path = options.out / f"{number:03d}{ending}.png"
            drawing_command.write_picture(path, picture, note)
            command.show(f"{path}: {note.get('prompt', note.get('class'))}")
            drawn.append({"picture": picture})
        drawing_command.write_grid(options.out / f"grid{ending}.png", drawn,
                                   list(map(str, prompts)), generator.checkpoint.note())


def seeds_of(options: argparse.Namespace, count: int) -> list[int]:
    """One seed per prompt: those of --seeds, or --seed, --seed + 1, ..."""
    if options.seeds is None:
        return check_seeds([options.seed + number for number in range(count)], count).tolist()
    if len(options.seeds) != count:
        raise UserError(f"--seeds names {len(options.seeds)} seeds for {count} pictures; give one "
                        "for each")
    return check_seeds(options.seeds, count).tolist()


def batches(count: int, options: argparse.Namespace) -> Iterator[slice]:
    """The rows that are drawn at once."""
    return (slice(start, start + options.batch_size)
            for start in range(0, count, options.batch_size))


def draw_all(generator: PixelGenerator, prompts: Sequence[str], seeds: Sequence[int],
             size: Size | None, options: argparse.Namespace) -> Iterator[tuple[np.ndarray, dict]]:
    """Yields each picture [H, W, 3] and its note."""
    chosen = {"guidance": options.guidance, "negative_prompt": options.negative_prompt,
              "solver": options.solver}
    interval = tuple(options.guidance_interval)
    for rows in batches(len(prompts), options):
        drawn = generator.generate(prompts[rows], size, options.steps, seeds[rows], **chosen,
                                   guidance_interval=interval, in_turn=options.guidance_in_turn)
        whole = padded(drawn.shape[1:3], generator.objective.net.patch_size)
        settings = sampler_settings(generator.objective, *whole, options.steps, **chosen)
        for prompt, seed, picture in zip(prompts[rows], seeds[rows], drawn):
            yield picture, {"prompt": prompt, "seed": seed, **settings.note(),
                            "solver": options.solver, "guidance_interval": list(interval),
                            **generator.checkpoint.note()}


def draw_classes(generator: ClassGenerator, labels: Sequence[int], seeds: Sequence[int],
                 size: Size | None, options: argparse.Namespace
                 ) -> Iterator[tuple[np.ndarray, dict]]:
    """Yields each picture [H, W, 3] and its note."""
    for rows in batches(len(labels), options):
        drawn = generator.generate(labels[rows], size, options.steps, seeds[rows],
                                   guidance=options.guidance)
        for label, seed, picture in zip(labels[rows], seeds[rows], drawn):
            yield picture, {"class": label, "seed": seed,
                            **sampler_note(generator.objective.config, options.steps,
                                           options.guidance),
                            **generator.checkpoint.note()}


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts of `--prompts`, or the lines of `--prompts_file` (# starts a comment line)."""
    if options.prompts:
        return options.prompts
    lines = map(str.strip, drawing_command.read_text(options.prompts_file).split("\n"))
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise UserError(f"{options.prompts_file} holds no prompt; write one a line")
    return prompts


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; UserError for a wrong one."""
    parser = drawing_command.make_parser("pid_jax.generate", __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", nargs="+", metavar="TEXT", help="one picture for each")
    source.add_argument("--classes", metavar="NUMBERS",
                        help="one picture for each, such as 0-9,207 (class-conditional networks)")
    source.add_argument("--prompts_file", type=Path, metavar="FILE", help="one prompt a line")
    parser.add_argument("--size", type=drawing_command.parse_size, metavar="HEIGHTxWIDTH",
                        nargs="+", help="in pixels, one or several; default: that of the run's "
                        "samples")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED",
                        help="one for each picture; default: --seed, --seed + 1, ...")
    parser.add_argument("--solver", choices=SOLVERS, default=next(iter(SOLVERS)),
                        help="of --prompts")
    parser.add_argument("--guidance_interval", type=float, nargs=2, default=[0.0, 1.0],
                        metavar=("LOW", "HIGH"), help="of --prompts: guide where LOW < t < HIGH; 1 "
                        "is noise")
    parser.add_argument("--guidance_in_turn", action="store_true",
                        help="of --prompts: two smaller network calls, to save memory")
    parser.add_argument("--batch_size", type=int, default=4, help="pictures drawn at once")
    options = parser.parse_args(arguments)
    if options.classes is not None and options.sequence > 1:
        raise UserError("--sequence belongs to --prompts; pictures of classes are spread over the "
                        "devices whole")
    if options.classes is not None and options.negative_prompt is not None:
        raise UserError("--negative_prompt belongs to --prompts; classes are guided away from none")
    check_solver(options)
    if options.batch_size < 1:
        raise UserError(f"--batch_size is {options.batch_size}; expected at least 1")
    return options


def check_solver(options: argparse.Namespace) -> None:
    """Refuses sampler flags of prompts where classes are drawn."""
    changed = [flag for flag, same in (
        ("--solver", options.solver == next(iter(SOLVERS))),
        ("--guidance_interval", options.guidance_interval == [0.0, 1.0]),
        ("--guidance_in_turn", not options.guidance_in_turn)) if not same]
    if options.classes is not None and changed:
        raise UserError(f"{changed[0]} belongs to --prompts; classes are drawn by the sampler of "
                        "the run's config")


if __name__ == "__main__":
    sys.exit(drawing_command.run(main))
