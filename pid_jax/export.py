"""Exports a decoder so that it draws without this package: StableHLO for jax, ONNX for others.

    python -m pid_jax.export --checkpoint runs/quickstart --out exported --size 256x256
    python -m pid_jax.export --checkpoint runs/quickstart --out exported --format onnx

Sampler, steps, guidance and negative prompt are inside; the batch may be of any size, the picture
has the one given. Every artefact is run here and compared with this package before its card
(`<artefact>.json`) is written, last; docs/export.md says how to draw with it. Exit status: 0 done,
2 bad input, 1 the artefact draws something else.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pid_jax import drawing_command
from pid_jax.data import command
from pid_jax.errors import RunFailed, UserError
from pid_jax.exporting import onnx_file, stablehlo
from pid_jax.exporting.program import DecoderProgram, decoder_program
from pid_jax.files import atomic_write
from pid_jax.inference import PixelDecoder
from pid_jax.sampling_inputs import check_finite

BOUND = {"float32": 1e-3, "bfloat16": 0.1}  # largest difference allowed, of values in [-1, 1]
CHECKED_BATCH = 2
RUNNER = Path(__file__).parent / "exporting" / "run_decoder.py"


def main(arguments: Sequence[str]) -> None:
    """Parses the command line and exports."""
    options = parse(arguments)
    decoder = PixelDecoder.from_checkpoint(options.checkpoint, options.which, options.lora_scale)
    dtype = options.dtype or jax.numpy.dtype(decoder.objective.net.dtype).name
    if options.format == "onnx" and dtype != "float32":
        raise UserError(f"ONNX is written in float32, this checkpoint runs in {dtype}; add "
                        "--dtype float32")
    size = options.size or (decoder.objective.sample_size,) * 2
    program = decoder_program(decoder, *size, options.steps, options.guidance,
                              options.negative_prompt, dtype)
    options.out.mkdir(parents=True, exist_ok=True)
    # An earlier artefact's card would speak for this one.
    (options.out / f"decoder.{options.format}.json").unlink(missing_ok=True)
    name, files, draw = WRITERS[options.format](options.out, program)
    difference = checked(options.out / name, program, draw, dtype)
    write_text(options.out, decoder, options.prompt)
    drawing_command.write_json(options.out / f"{name}.json", card(
        files, program, decoder, dtype, size, options.prompt, difference))
    command.show(f"{options.out / name}: {size[0]}x{size[1]}, {program.settings.steps} steps, "
                 f"{dtype}, largest difference {difference:.1e}")


def write_stablehlo(folder: Path, program: DecoderProgram) -> tuple[str, list[str], Callable]:
    """Writes program, weights and runner; gives the artefact's name, all names, how to draw."""
    blob, name = stablehlo.serialised(program), "decoder.stablehlo"
    stablehlo.write_weights(folder / "weights.safetensors", program.weights)
    with atomic_write(folder / RUNNER.name) as file:
        file.write(RUNNER.read_text(encoding="utf-8"))
    with atomic_write(folder / name, "wb") as file:
        file.write(blob)
    draw = jax.export.deserialize(bytearray(blob)).call
    return (name, [name, "weights.safetensors", RUNNER.name],
            lambda inputs: draw(dict(program.weights), inputs))


def write_onnx(folder: Path, program: DecoderProgram) -> tuple[str, list[str], Callable]:
    """Writes the graph; gives its name, all names, how to draw."""
    name = "decoder.onnx"
    files = onnx_file.write_onnx(folder / name, program)
    return name, files, lambda inputs: onnx_file.run_onnx(folder / name, inputs)


WRITERS = {"stablehlo": write_stablehlo, "onnx": write_onnx}


def checked(path: Path, program: DecoderProgram, draw: Callable, dtype: str) -> float:
    """Largest difference between the artefact's pictures and ours; RunFailed above the bound."""
    inputs = program.random_inputs(CHECKED_BATCH)
    try:
        ours = check_finite(jax.jit(program.call)(program.weights, inputs), "artefact")
    except RunFailed:
        path.unlink()
        raise
    difference = float(np.max(np.abs(np.asarray(draw(inputs)) - ours)))
    if not difference <= BOUND[dtype]:
        path.unlink()
        raise RunFailed(f"{path.name} draws pictures that differ by {difference:.2g} from this "
                        f"package's (bound {BOUND[dtype]:.2g}); it was removed")
    return difference


def write_text(folder: Path, decoder: PixelDecoder, prompt: str) -> None:
    """Writes the prompt's embedding as float32 [1, T, E]: the artefact has no text encoder."""
    with atomic_write(folder / "text.npy", "wb") as file:
        np.save(file, np.asarray(decoder.objective.prompts([prompt]), np.float32))


def card(files: Sequence[str], program: DecoderProgram, decoder: PixelDecoder, dtype: str,
         size: tuple[int, int], prompt: str, difference: float) -> dict[str, Any]:
    """What the artefact takes and gives, and where it comes from."""
    return {
        "files": [*files, "text.npy"],
        "inputs": {name: ["batch", *shape] for name, shape in sorted(program.inputs.items())},
        "output": ["batch", *size, 3], "dtype": dtype, "prompt_of_text_npy": prompt,
        "latent_family": decoder.objective.codec.family,
        "parameters": sum(leaf.size for leaf in program.weights.values()),
        "largest_difference": difference, "bound": BOUND[dtype],
        **program.settings.note(), **decoder.checkpoint.note()}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; UserError for a wrong one."""
    parser = command.Parser(prog="python -m pid_jax.export", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER",
                        help="a workdir (its newest checkpoint) or the folder of one step")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--format", default="stablehlo", choices=sorted(WRITERS))
    parser.add_argument("--size", type=drawing_command.parse_size, metavar="HEIGHTxWIDTH",
                        help="of the drawn picture; default: that of the run's samples")
    parser.add_argument("--which", default="ema", metavar="WEIGHTS",
                        help="ema (or another average by its name), net or untrained")
    parser.add_argument("--lora_scale", type=float, metavar="SCALE")
    parser.add_argument("--steps", type=int, help="default, as of the next two: the run's samples")
    parser.add_argument("--guidance", type=float, help="1 for none")
    parser.add_argument("--negative_prompt", metavar="TEXT")
    parser.add_argument("--prompt", default="", metavar="TEXT",
                        help="whose embedding goes into text.npy")
    parser.add_argument("--dtype", choices=sorted(BOUND), help="of the arithmetic; default: the "
                        "run's")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
