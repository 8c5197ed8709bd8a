"""How fast are pictures decoded, resized and cropped, and does a training wait for them?

    python -m benchmarks.data [--sizes 4096:2048 2048:2048] [--picture photo.jpg] [--json FILE]
    python -m benchmarks.data --loader [--workers 0 1 2] [--json FILE]
    python -m benchmarks.data --config configs/quickstart_pid.py --steps 20 [--json FILE]

The first measures one picture on one core, NATIVE:TARGET in pixels: the bare decoder (Pillow, no
more than the pixels), then each part of a stream's path, for `decode=exact` and `decode=draft`. The
picture is a JPEG of quality 92, of noise with the spectrum of photographs, or --picture brought to
that size. --loader measures whole batches with worker processes. --config trains for some steps,
blocking after each, and says which share of the time went into waiting for data.
"""

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks import timing
from pid_jax import images
from pid_jax.data import command
from pid_jax.data.buckets import Bucket, parse_size
from pid_jax.data.dataset import DatasetWriter
from pid_jax.data.loading import Augmentation, Draws, show
from pid_jax.data.pipeline import build_pipeline
from pid_jax.data.plan import Slot
from pid_jax.data.records import Record
from pid_jax.files import atomic_write

BARE = "bare decoder"


def jpeg(side: int, picture: str | None, seed: int = 0) -> bytes:
    """A JPEG of side x side pixels."""
    if picture:
        image = images.decode(Path(picture).read_bytes()).resize((side, side))
    else:
        image = noise(side, seed)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=92)
    return buffer.getvalue()


def noise(side: int, seed: int) -> Image.Image:
    """Octaves of noise of nearly equal strength, as photographs have."""
    rng, total = np.random.default_rng(seed), np.full((side, side, 3), 128, np.float32)
    strength, cells = 0.5, 4
    while cells <= side:
        octave = (rng.normal(size=(cells, cells, 3)) * 32 + 128).clip(0, 255).astype(np.uint8)
        grid = Image.fromarray(octave).resize((side, side), Image.Resampling.BICUBIC)
        total += (np.asarray(grid, np.float32) - 128) * strength
        strength, cells = 0.75 * strength, cells * 2
    return Image.fromarray(total.clip(0, 255).astype(np.uint8))


def parts(data: bytes, native: int, target: int) -> dict[str, Callable[[], object]]:
    """The functions to time for one picture."""
    record = Record("p", "benchmark", native, native, {}, data)
    bucket, draws = Bucket("b", target, target), Draws(0, Slot(0, None, 0, 0))
    ways = {name: Augmentation(decode=name) for name in ("exact", "draft")}

    def bare() -> None:
        Image.open(io.BytesIO(data)).load()

    def pixels(way: str) -> np.ndarray:
        return np.asarray(show(record, bucket, ways[way], draws))

    found = {BARE: bare, "decode": lambda: images.decode(data)}
    for way in ways:
        found[f"{way}: decode, resize, crop"] = lambda way=way: pixels(way)
        found[f"{way}: as floats too"] = lambda way=way: images.to_float(pixels(way))
    return found


def time_pictures(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds of each part, by NATIVE:TARGET; on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    found = {}
    for size in arguments.sizes:
        native, target = map(int, size.split(":"))
        data = jpeg(native, arguments.picture)
        seconds = timing.interleaved(parts(data, native, target), arguments.repeats)
        found[size] = seconds
        bare = min(seconds[BARE])
        print(f"{native} to {target} px, {len(data) / 1e6:.1f} MB, one core, best of "
              f"{arguments.repeats}")
        for name, values in seconds.items():
            print(f"  {name:28}{1 / min(values):9.2f} images/s{bare / min(values):9.1%} of bare")
    os.sched_setaffinity(0, cores)
    return found


def time_loader(arguments: argparse.Namespace) -> dict[str, float]:
    """Images a second of whole batches, by number of workers."""
    native, target = map(int, arguments.sizes[0].split(":"))
    rates = {}
    with tempfile.TemporaryDirectory() as folder:
        with DatasetWriter(Path(folder)) as writer:
            for number in range(8):
                writer.add(Record(f"p{number}", "benchmark", native, native, {"prompt": "p"},
                                  jpeg(native, arguments.picture, number)))
        for workers in arguments.workers:
            with build_pipeline(folder, 4, image_size=target, threads=1, workers=workers,
                                prefetch=1) as batches:
                for _ in range(2 * max(1, workers)):  # what was ready before the clock started
                    next(batches)
                start = time.perf_counter()
                for _ in range(arguments.steps):
                    next(batches)
                rate = rates[str(workers)] = 4 * arguments.steps / (time.perf_counter() - start)
            print(f"{native} to {target} px, {workers} workers: {rate:.2f} images/s")
    return rates


def time_training(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of some steps of a training, and those of them that went into waiting for data."""
    import jax

    from pid_jax import command_line, objectives, train
    from pid_jax.parallel import mesh as mesh_lib
    from pid_jax.training import restore
    from pid_jax.training.checkpoint import Checkpointer

    config = command_line.load_config(arguments.config)
    config.data.path = arguments.data or config.data.path
    mesh = mesh_lib.make_mesh(config.mesh, config.data.batch_size, config.optim.accumulate)
    objective = objectives.build(config, mesh)
    objective.load_encoders()
    waited, started = 0.0, time.perf_counter()
    with (tempfile.TemporaryDirectory() as folder,
          train.open_data(config, objective, mesh) as batches):
        state, _ = restore.initial_state(config, objective, mesh, Checkpointer(Path(folder), 1))
        update = train.compile_step(objective, mesh, state, objective.phase(0))
        for step in range(arguments.steps + 1):
            before = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - before
            state, values = update(state, mesh_lib.shard_batch(objective.prepare(batch), mesh))
            jax.block_until_ready(values)
            if step == 0:  # it compiled
                waited, started = 0.0, time.perf_counter()
    total = time.perf_counter() - started
    print(f"{arguments.config}: {arguments.steps} steps in {total:.2f} s, {waited:.3f} s of it "
          f"waiting for data ({waited / total:.1%})")
    return {"seconds": total, "waited": waited}


def main(words: Sequence[str]) -> None:
    """Parses the command line and measures. Raises UserError for anything a person can mend."""
    parser = command.Parser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["4096:2048", "4096:4096", "2048:2048"],
                        metavar="NATIVE:TARGET")
    parser.add_argument("--picture", help="a photograph instead of noise")
    parser.add_argument("--repeats", type=command.count, default=5)
    parser.add_argument("--loader", action="store_true", help="time batches with workers")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--config", help="time a training with this config")
    parser.add_argument("--data", help="data set of the training; default: the config's")
    parser.add_argument("--steps", type=command.count, default=12)
    parser.add_argument("--json")
    arguments = parser.parse_args(words)
    for size in arguments.sizes:
        parse_size(size.replace(":", "x"))
    measure = (time_training if arguments.config else time_loader if arguments.loader
               else time_pictures)
    result = measure(arguments)
    if arguments.json:
        with atomic_write(arguments.json) as file:
            json.dump({"machine": timing.machine(), "result": result}, file, indent=1)


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
