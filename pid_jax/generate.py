"""Draws pictures from prompts or of classes.

    python -m pid_jax.generate --checkpoint runs/pixeldit --out drawn --prompts "a cat" "a rocket"
    python -m pid_jax.generate --checkpoint runs/digits/run --out drawn --classes 0-9

Writes OUT/000.png, 001.png, ... with a JSON beside each, and OUT/grid.png. Exit status: 0 all
pictures are written, 2 bad input, 1 the network's output was not finite.
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
from pid_jax.sampling_inputs import sampler_settings


def main(arguments: Sequence[str]) -> None:
    """Parses the command line and draws."""
    options = parse(arguments)
    if options.classes is not None:
        prompts = parse_classes(options.classes)
        generator, draw = ClassGenerator, draw_classes
    else:
        prompts, generator, draw = read_prompts(options), PixelGenerator, draw_all
    where = {} if options.sequence == 1 else {"sequence": options.sequence}
    generator = generator.from_checkpoint(options.checkpoint, options.which,
                                          options.lora_scale, **where)
    drawn = []
    for number, (picture, note) in enumerate(draw(generator, prompts, options)):
        path = options.out / f"{number:03d}.png"
        drawing_command.write_picture(path, picture, note)
        command.show(f"{path}: {note.get('prompt', note.get('class'))}")
        drawn.append({"picture": picture})
    drawing_command.write_grid(options.out / "grid.png", drawn, list(map(str, prompts)),
                               generator.checkpoint.note())


def draw_all(generator: PixelGenerator, prompts: Sequence[str], options: argparse.Namespace
             ) -> Iterator[tuple[np.ndarray, dict]]:
    """Yields each picture [H, W, 3] and its note; prompt k is drawn with seed + k."""
    for start in range(0, len(prompts), options.batch_size):
        batch = list(prompts[start:start + options.batch_size])
        seeds = [options.seed + start + k for k in range(len(batch))]
        drawn = generator.generate(batch, options.size, options.steps, seeds,
                                   guidance=options.guidance,
                                   negative_prompt=options.negative_prompt)
        settings = sampler_settings(generator.objective, *drawn.shape[1:3], options.steps,
                                    options.guidance, options.negative_prompt)
        for prompt, seed, picture in zip(batch, seeds, drawn):
            yield picture, {"prompt": prompt, "seed": seed, **settings.note(),
                            **generator.checkpoint.note()}


def draw_classes(generator: ClassGenerator, labels: Sequence[int], options: argparse.Namespace
                 ) -> Iterator[tuple[np.ndarray, dict]]:
    """Yields each picture [H, W, 3] and its note; class k of the list is drawn with seed + k."""
    for start in range(0, len(labels), options.batch_size):
        batch = labels[start:start + options.batch_size]
        seeds = [options.seed + start + k for k in range(len(batch))]
        drawn = generator.generate(batch, options.size, options.steps, seeds,
                                   guidance=options.guidance)
        for label, seed, picture in zip(batch, seeds, drawn):
            yield picture, {"class": label, "seed": seed,
                            **sampler_note(generator.objective.config, options.steps,
                                           options.guidance),
                            **generator.checkpoint.note()}


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts of `--prompts`, or the lines of `--prompts_file` (# starts a comment line)."""
    if options.prompts:
        return options.prompts
    lines = map(str.strip, drawing_command.read_text(options.prompts_file).splitlines())
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
                        help="in pixels; default: that of the run's samples")
    parser.add_argument("--batch_size", type=int, default=4, help="pictures drawn at once")
    options = parser.parse_args(arguments)
    if options.classes is not None and options.sequence > 1:
        raise UserError("--sequence belongs to --prompts; pictures of classes are spread over the "
                        "devices whole")
    if options.classes is not None and options.negative_prompt is not None:
        raise UserError("--negative_prompt belongs to --prompts; classes are guided away from none")
    if options.batch_size < 1:
        raise UserError(f"--batch_size is {options.batch_size}; expected at least 1")
    return options


if __name__ == "__main__":
    sys.exit(drawing_command.run(main))
