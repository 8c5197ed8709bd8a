"""Draws pictures with a class-conditional checkpoint, or takes ready ones, and scores them.

    python -m pid_jax.evaluate --checkpoint runs/digits/run --reference runs/digits/data --count 500
        --out runs/digits/scores
    python -m pid_jax.evaluate --samples drawn.npz --reference VIRTUAL_imagenet256_labeled.npz
        --inception inception.safetensors --out scores

FID, sFID, Inception Score, precision and recall need Inception's weights (docs/evaluation.md);
without them the Frechet distance of raw pixels and the artefacts are scored. Picture i has the seed
`--seed` + i and the class i mod classes, so neither batch size nor the number of hosts changes
anything; running the command again goes on where it stopped.
"""

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pid_jax import class_inference, loading, pictures
from pid_jax.data import command
from pid_jax.errors import UserError
from pid_jax.evaluation import drawing, features, inception, plots, scores
from pid_jax.files import atomic_write
from pid_jax.images import to_float, to_uint8
from pid_jax.objectives.jit_c2i import JitC2I
from pid_jax.objectives.pixeldit_c2i import PixelDitC2I
from pid_jax.parallel import multihost
from pid_jax.training import checkpoint as checkpoint_lib

GRID_SIDE = 10


def main(arguments: Sequence[str]) -> None:
    """Parses the command line, draws, scores, writes `results.json`, `scores.png` and the pictures.
    """
    options = parse(arguments)
    multihost.start()
    runs = list(_runs(options))
    for run in runs:
        run.draw()
    multihost.barrier("all pictures are drawn")
    if not multihost.is_writer():
        return
    weights = inception.load_inception(options.inception) if options.inception else None
    extract = features.make_extractor(weights)
    reference = read_reference(options, extract)
    results = []
    for run in runs:
        results.append(run.score(extract, reference))
        command.show(_line(results[-1]))
        _write_results(options.out, results)
    plots.plot(results, options.out / "scores.png")
    if weights is None:
        command.show("FID, sFID, Inception Score, precision and recall: unavailable, they need "
                     "--inception FILE")
    command.show(f"{options.out / 'results.json'} and {options.out / 'scores.png'} are written")


def read_reference(options: argparse.Namespace, extract: features.Extract
                   ) -> features.Reference | None:
    """The reference; one computed from pictures is kept in OUT/reference.npz."""
    if options.reference is None:
        return None
    reference = features.read_reference(options.reference, extract)
    reference.save(options.out / "reference.npz")
    return reference


class ReadyRun:
    """Pictures from a file."""

    def __init__(self, options: argparse.Namespace):
        self._options = options

    def draw(self) -> None:
        """Nothing is left to draw."""

    def score(self, extract: features.Extract, reference: features.Reference | None) -> dict:
        """The scores with where the pictures are from."""
        path = self._options.samples
        arrays = features.read_arrays(path)
        if "arr_0" not in arrays:
            raise UserError(f"{path} holds no pictures (arr_0); it holds {', '.join(arrays)}")
        drawn = features.check_pictures(arrays["arr_0"], path)
        return {"samples": str(path), "count": len(drawn),
                "scores": _scores(drawn, extract, reference, self._options.period)}


class DrawnRun:
    """Pictures drawn with one checkpoint, one set of weights and one guidance scale."""

    def __init__(self, options: argparse.Namespace, folder: Path, which: str,
                 guidance: float | None):
        loading.check_which(folder, which)
        objective = loading.open_objective(folder, (PixelDitC2I, JitC2I))
        self._options, self._checkpoint, self._which = options, folder, which
        self._period = options.period or objective.net.patch_size
        self._plan = drawing.Plan(options.count, objective.net.num_classes, options.seed)
        self._guidance = guidance
        size, steps = objective.sample_size, options.steps or objective.config.sample.steps
        objective.solver_table(size, size, steps, guidance)  # refuses what it cannot draw with
        self._settings = {
            "checkpoint": str(folder), "step": int(folder.name), "weights": which,
            "count": options.count, "seed": options.seed, "size": size,
            **class_inference.sampler_note(objective.config, options.steps, guidance)}
        name = f"step{folder.name}_{which}_guidance{self._settings['guidance']:g}"
        self._folder = options.out / name

    def draw(self) -> None:
        """Draws this host's share of what is not there yet; the weights are held meanwhile."""
        open_generator = functools.cache(
            lambda: class_inference.ClassGenerator.from_checkpoint(self._checkpoint, self._which))

        def draw(labels: Sequence[int], seeds: Sequence[int]) -> np.ndarray:
            return to_uint8(open_generator().generate(
                labels, steps=self._options.steps, guidance=self._guidance, seed=seeds))

        devices = jax.local_device_count()
        batch = -(-self._options.batch_size // devices) * devices
        drawing.draw_parts(self._plan, draw, self._folder, self._settings, batch,
                           jax.process_index(), jax.process_count(), command.show)

    def score(self, extract: features.Extract, reference: features.Reference | None) -> dict:
        """The scores with every setting; writes ADM's file and a sheet of the first pictures."""
        drawn = drawing.gather(self._plan, self._folder)
        labels = self._plan.labels(0, len(drawn))
        drawing.save_samples(self._folder / "samples.npz", drawn, labels)
        shown = to_float(drawn[:GRID_SIDE**2])
        columns = [shown[k::GRID_SIDE] for k in range(min(GRID_SIDE, len(shown)))]
        rows = min(map(len, columns))
        pictures.save_png(self._folder / "grid.png", pictures.grid([c[:rows] for c in columns]))
        return {**self._settings, "scores": _scores(drawn, extract, reference, self._period)}


def _scores(drawn: np.ndarray, extract: features.Extract, reference: features.Reference | None,
            period: int | None) -> dict[str, Any]:
    found = scores.score(extract(drawn), reference)
    return found | (scores.artefact_scores(drawn, period) if period else {})


def _runs(options: argparse.Namespace) -> Iterator[ReadyRun | DrawnRun]:
    if options.samples:
        yield ReadyRun(options)
        return
    newest = checkpoint_lib.find_step_folder(options.checkpoint)
    folders = [newest]
    if options.all_checkpoints:
        folders = sorted((f for f in newest.parent.iterdir() if f.name.isdigit()),
                         key=lambda folder: int(folder.name))
    for folder, which, guidance in itertools.product(folders, options.which, options.guidance):
        yield DrawnRun(options, folder, which, guidance)


def _line(result: dict[str, Any]) -> str:
    place = [f"{key} {result[key]}" for key in ("step", "weights", "guidance") if key in result]
    values = [f"{name} {value:.4g}" for name, value in result["scores"].items()
              if isinstance(value, float)]
    return " | ".join([*place, f"{result['count']} pictures", *values])


def _write_results(folder: Path, results: Sequence[dict[str, Any]]) -> None:
    with atomic_write(folder / "results.json") as file:
        json.dump(list(results), file, indent=2)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; UserError for a wrong one."""
    parser = command.Parser(prog="python -m pid_jax.evaluate", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", type=Path, metavar="FOLDER",
                        help="a workdir (its newest checkpoint) or the folder of one step")
    source.add_argument("--samples", type=Path, metavar="FILE", help=".npz with pictures arr_0")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for everything")
    parser.add_argument("--reference", type=Path, metavar="PATH",
                        help="packed data set, or .npz with pictures or statistics")
    parser.add_argument("--inception", type=Path, metavar="FILE",
                        help="weights of FID's Inception, .safetensors or .npz")
    parser.add_argument("--all_checkpoints", action="store_true",
                        help="every checkpoint of the workdir: scores against the step")
    parser.add_argument("--which", nargs="+", default=["ema"], metavar="WEIGHTS",
                        help="sets of weights: ema, another average, net")
    parser.add_argument("--guidance", nargs="+", type=float, default=[None], metavar="SCALE",
                        help="guidance scales; default: that of the run's samples")
    parser.add_argument("--count", type=command.count, default=50_000, help="pictures of a run")
    parser.add_argument("--batch_size", type=command.count, default=50,
                        help="drawn at once by a host; rounded up to its devices")
    parser.add_argument("--steps", type=command.count, help="default: as the run's samples")
    parser.add_argument("--seed", type=int, default=0, help="of the first picture")
    parser.add_argument("--period", type=command.count, metavar="PIXELS",
                        help="patch size of the artefacts; default: the network's")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
