"""Encodes every picture of a run once, so that training need not run the latent codec.

    python -m pid_jax.embed_latents --config=configs/pid_teacher_flux_2k.py --dst=latents
    python -m pid_jax.main --config=configs/pid_teacher_flux_2k.py --config.data.latents=latents ...

Pictures are those of `config.data.path`, each reduced from its bucket as in training; so nothing
may be drawn at random (crop=center, no flip). On many hosts, give each its `--process=I
--processes=N`; all chips of a host are used. Started again, a process goes on after its last whole
file.
"""

import concurrent.futures
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh
from ml_collections import ConfigDict

from pid_jax import command_line, embedding_command, images, objectives
from pid_jax.data import pipeline, stored_latents
from pid_jax.data.buckets import Bucket
from pid_jax.data.plan import Slot
from pid_jax.diffusion import degrade
from pid_jax.errors import UserError
from pid_jax.objectives.program import CodecProgram
from pid_jax.parallel.mesh import AXES, batch_sharding

flags.adopt_module_key_flags(embedding_command)
BATCH = flags.DEFINE_integer("batch", 8, "pictures encoded at once", lower_bound=1)
DTYPE = flags.DEFINE_enum("dtype", "float32", list(stored_latents.DTYPES), "of what is stored")

Encode = Callable[[np.ndarray], np.ndarray]


def main() -> None:
    """Encodes the share of this process."""
    embed(*embedding_command.parse(), BATCH.value, DTYPE.value)


def embed(config: ConfigDict, folder: Path, process: int = 0, processes: int = 1,
          rows: int = 512, batch: int = 8, dtype: str = "float32") -> None:
    """Writes the latents of this process's share of the records, in files of `rows`.

    Raises:
      UserError: no data set, an objective without codec, data options that draw at random, or a
        folder with latents of something else.
    """
    objective = objectives.build(config)
    made_by = objective.latent_origin()
    with open_pictures(config) as batches:
        origin = {**batches.origin, **made_by}
        buckets = {int(record): bucket for bucket, members in zip(
            batches.plan.buckets, batches.plan.members) for record in members}
        records = range(process, batches.records, processes)
        encode = make_encoder(objective, batch)
        for part, start in enumerate(range(0, len(records), rows)):
            path = folder / stored_latents.file_name(process, part)
            chosen = records[start:start + rows]
            if not stored_latents.is_whole(path, chosen, origin):
                latents = encode_records(batches.loader.load, encode, chosen, buckets, batch)
                stored_latents.write_file(path, [stored_latents.to_bytes(
                    record, latents.get(record), dtype, origin) for record in chosen])
            print(f"{path}: {min(start + rows, len(records))} of {len(records)} pictures",
                  flush=True)
        stored_latents.write_manifest(folder, process, processes, origin=origin,
                                      records=batches.records, rows=rows)


def open_pictures(config: ConfigDict) -> pipeline.Batches:
    """The run's data with the plan of its buckets, every picture in one of them."""
    if not config.data.path:
        raise UserError("config.data.path is not set: name the data set whose pictures are meant")
    options = {**config.data, "batch_size": 1, "threads": 0, "workers": 0, "latents": ""}
    batches = pipeline.build_pipeline(**options)
    pipeline.check_fixed(batches.options)
    return batches


def make_encoder(objective: objectives.Objective, batch: int) -> Encode:
    """The function from pictures float32 [batch, H, W, 3] to latents of the reduced ones."""
    devices = jax.local_devices()
    devices = devices if batch % len(devices) == 0 else devices[:1]
    mesh = Mesh(np.array(devices).reshape(-1, 1, 1), AXES)
    program = CodecProgram(
        objective, lambda o: lambda image: o.codec.encode(degrade.downsample(image, o.lq_scale)),
        mesh, in_shardings=(batch_sharding(mesh),))
    return lambda image: np.asarray(program(image))


def encode_records(load: Callable[[Slot], dict], encode: Encode, records: Sequence[int],
                   buckets: dict[int, Bucket], batch: int) -> dict[int, np.ndarray]:
    """Latents [h, w, C] by record; those that cannot be read, and those of no bucket, have none."""
    latents: dict[int, np.ndarray] = {}
    for numbers, pixels in _same_sized(load, records, buckets, batch):
        filled = np.stack([*pixels, *[pixels[0]] * (batch - len(pixels))])
        latents.update(zip(numbers, encode(images.to_float(filled))))
    return latents


def _same_sized(load: Callable[[Slot], dict], records: Sequence[int], buckets: dict[int, Bucket],
                batch: int) -> Iterator[tuple[list[int], list[np.ndarray]]]:
    """Numbers and pixels of up to `batch` records of one bucket at a time."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for bucket in dict.fromkeys(buckets[r] for r in records if r in buckets):
            mine = [r for r in records if buckets.get(r) == bucket]
            for start in range(0, len(mine), batch):
                chosen = mine[start:start + batch]
                read = pool.map(lambda r, bucket=bucket: _pixels(load, r, bucket), chosen)
                found = [(r, pixels) for r, pixels in zip(chosen, read) if pixels is not None]
                if found:
                    yield tuple(map(list, zip(*found)))


def _pixels(load: Callable[[Slot], dict], record: int, bucket: Bucket) -> np.ndarray | None:
    try:
        return load(Slot(record, bucket, 0, 0))["pixels"]
    except UserError as error:  # training replaces such a picture by another
        print(f"left out: {error}", file=sys.stderr, flush=True)
        return None


if __name__ == "__main__":
    sys.exit(command_line.run(main, sys.argv))
