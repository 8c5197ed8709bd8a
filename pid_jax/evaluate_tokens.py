"""Encodes and decodes a data set and measures how close the pictures come back.

    python -m pid_jax.evaluate_tokens --checkpoint runs/ditok --data runs/photos/heldout \
        --mean_of runs/photos/train

Every picture is cut to its square centre. Writes evaluation_history/ below --out (default: the
run's folder) and prints the metrics; `pid_jax.evaluation.reconstruction` defines them. rFID and
the Inception Score need --inception_weights, LPIPS needs --lpips_weights; without them they are
reported as unavailable. Exit status: 0 done, 2 bad input, 1 a picture was not finite.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pid_jax import pictures
from pid_jax.data import command
from pid_jax.data.dataset import Dataset
from pid_jax.encoders import perceptual
from pid_jax.evaluation import history, inception
from pid_jax.evaluation.reconstruction import Scores
from pid_jax.tokenizer import load_tokenizer
from pid_jax.tokens import record_batches
from pid_jax.training.checkpoint import find_step_folder

ROWS = 8
"""Pictures in the comparison."""


def main(arguments: Sequence[str]) -> None:
    """Parses the command line, measures and reports."""
    options = parse(arguments)
    step_folder = find_step_folder(options.checkpoint)
    tokenizer = load_tokenizer(step_folder, options.which)
    dataset = Dataset(options.data)
    lpips = options.lpips_weights and perceptual.load_distance("lpips_vgg", options.lpips_weights)
    weights = options.inception_weights and inception.load_inception(options.inception_weights)
    scores = Scores(tokenizer.codebook_size, weights or None, lpips or None,
                    mean_picture(options.mean_of, tokenizer.side, options.batch))
    rows, count = [], 0
    for truth in record_batches(dataset, tokenizer.side, options.batch):
        indices = tokenizer.encode(truth)
        drawn = tokenizer.decode(indices, options.seed + count, **sampler(options))
        scores.add(truth, drawn, indices)
        rows += list(zip(drawn, truth))[:ROWS - len(rows)]
        count += len(truth)
    report(options, step_folder, scores, rows, count)


def sampler(options: argparse.Namespace) -> dict:
    """The options of the decoder that were given."""
    given = {name: getattr(options, name) for name in ("steps", "guidance")}
    return {name: value for name, value in given.items() if value is not None}


def mean_picture(folder: Path | None, side: int, batch: int) -> np.ndarray | None:
    """The mean float32 [side, side, 3] of a data set's pictures, or None."""
    if folder is None:
        return None
    dataset = Dataset(folder)
    total = sum(part.sum(0, dtype=np.float64) for part in record_batches(dataset, side, batch))
    return (total / len(dataset)).astype(np.float32)


def report(options: argparse.Namespace, step_folder: Path, scores: Scores, rows: Sequence[tuple],
           count: int) -> None:
    """Writes the history and prints every metric."""
    results = scores.results()
    columns = [np.stack(column) for column in zip(*rows)]
    evaluation = history.Evaluation(int(step_folder.name), results, scores.unavailable, {
        "weights": options.which, "pictures": count, "data": options.data.name,
        "seed": options.seed, **sampler(options)})
    folder = options.out or run_folder(step_folder)
    path = history.record(folder, evaluation, pictures.grid(columns))
    for name, value in results.items():
        command.show(f"{name:<20} {value:.6g}")
    for name, reason in scores.unavailable.items():
        command.show(f"{name:<20} unavailable: {reason}")
    command.show(f"{count} pictures, step {step_folder.name}; in {path}")


def run_folder(step_folder: Path) -> Path:
    """The folder of the run whose checkpoint this is."""
    parents = step_folder.parents
    return parents[1] if parents[0].name == "checkpoints" else parents[0]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; UserError for a wrong one."""
    parser = command.Parser(prog="python -m pid_jax.evaluate_tokens", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--data", type=Path, required=True, help="a packed data set")
    parser.add_argument("--which", default="ema", metavar="WEIGHTS",
                        help="ema (or another average by its name), net or untrained")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: the run's folder")
    parser.add_argument("--mean_of", type=Path, metavar="DATASET",
                        help="also score the mean picture of this data set, such as the training "
                        "set")
    parser.add_argument("--batch", type=command.count, default=16)
    parser.add_argument("--steps", type=command.count, help="default: as the run's samples")
    parser.add_argument("--guidance", type=float, help="on the label; default: the run's")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--inception_weights", metavar="FILE", help=".safetensors or .npz")
    parser.add_argument("--lpips_weights", metavar="FILE", help="VGG16, .safetensors or .npz")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
