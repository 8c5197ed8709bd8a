"""What a decode will take, before any weight is read: memory by compiling, FLOPs by counting."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pid_jax import compilation_cache
from pid_jax.flops import Flops, count_flops
from pid_jax.inference import PixelDecoder
from pid_jax.loading import (STORED, WEIGHTS, Checkpoint, check_which, drawing_mesh, for_drawing,
                             open_objective)
from pid_jax.models.lora import AdaptedNet
from pid_jax.models.quantised import quantise
from pid_jax.objectives.pid_teacher import PidTeacher
from pid_jax.parallel.sharding import bytes_per_device, state_shardings
from pid_jax.sampling_inputs import SamplerSettings, sampler_settings
from pid_jax.training import checkpoint as checkpoint_lib
from pid_jax.training.state import Params

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Plan:
    """One batch shape.

    Attributes:
      size: (height, width) drawn, padding included; batch; tiles: parts of a network call.
      weights, inputs, temporaries, output: bytes on each device.
      flops: of the whole sampling of the batch.
    """

    size: tuple[int, int]
    batch: int
    steps: int
    tiles: int
    weights: int
    inputs: int
    temporaries: int
    output: int
    flops: Flops

    @property
    def peak(self) -> int:
        """Bytes on each device while drawing."""
        return self.weights + self.inputs + self.temporaries + self.output

    def lines(self) -> Iterator[str]:
        """The plan for people."""
        yield (f"{self.size[0]} x {self.size[1]} (height x width), batch {self.batch}, "
               f"{self.steps} steps, {self.tiles} tile{'s' * (self.tiles != 1)}")
        for name in ("weights", "inputs", "temporaries", "output", "peak"):
            yield f"  {name:<12} {getattr(self, name) / GIB:9.3f} GiB"
        yield (f"  {'FLOPs':<12} {self.flops.total / 1e12:9.3f} TFLOP, attention "
               f"{self.flops.attention / max(self.flops.total, 1):.0%}")


def unloaded(path: str | Path, which: str = "ema", weights: str = STORED, sequence: int = 1,
             data: int = 1, pit_chunks: int | None = None) -> PixelDecoder:
    """A decoder whose weights, kept as `weights` says, are only described: it plans, but cannot
    draw."""
    compilation_cache.enable()
    folder, mesh = checkpoint_lib.find_step_folder(path), drawing_mesh(sequence, data)
    check_which(folder, which)
    objective = for_drawing(open_objective(folder, PidTeacher, mesh), pit_chunks)
    if isinstance(objective.net, AdaptedNet):  # drawing adds the adapters to the kernels
        objective = copy.copy(objective)
        objective.net = objective.net.net
        objective.__dict__.pop("abstract_params", None)
    places = state_shardings(objective.abstract_params, mesh)
    params = checkpoint_lib.with_shardings(as_stored(folder, which, objective.abstract_params),
                                           places)
    if weights != STORED:
        params = described(params, weights)
    return PixelDecoder(Checkpoint(folder, "planned", objective, params, mesh, weights))


def described(params: Params, kind: str) -> Params:
    """Shapes and places of parameters that are kept in 8 bits, from those of the stored ones."""
    def placed(leaf: jax.ShapeDtypeStruct, kept: Any) -> Any:
        # A scale has one entry along an axis that may be divided: it is whole there.
        whole = lambda x: NamedSharding(leaf.sharding.mesh, P(*(
            name if size > 1 else None for name, size in itertools.zip_longest(
                leaf.sharding.spec, x.shape))))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole(x)),
                            kept)

    return jax.tree.map(placed, dict(params), jax.eval_shape(
        lambda params: quantise(params, kind), params))


def as_stored(folder: Path, which: str, shapes: Params) -> Params:
    """The shapes of parameters with the dtypes in which a checkpoint keeps them."""
    name = WEIGHTS.get(which, which) or checkpoint_lib.PARAMS
    name = name if (folder / name).is_dir() else checkpoint_lib.PARAMS
    stored = checkpoint_lib.flat(checkpoint_lib.saved_shapes(folder, name))
    return checkpoint_lib.nested({
        path: jax.ShapeDtypeStruct(leaf.shape, getattr(stored.get(path), "dtype", leaf.dtype))
        for path, leaf in checkpoint_lib.flat(shapes).items()})


def plan(decoder: PixelDecoder, latent_shape: tuple[int, ...], steps: int | None = None,
         guidance: float | None = None, tile: int | None = None) -> Plan:
    """Compiles the drawing of latents [B, h, w, C] for this process's devices, and reports.

    What is compiled goes to the compilation cache, where the drawing finds it.
    """
    objective, size = decoder.objective, decoder.output_size(latent_shape)
    rows = decoder.tile_rows(size, tile)
    settings = sampler_settings(objective, *size, steps, guidance,
                                np.zeros(objective.text_shape(1).shape, np.float32))
    lowered = decoder.lower(latent_shape, settings, rows)
    memory = lowered.compile().memory_analysis()
    weights = bytes_per_device(decoder.checkpoint.params)
    tiles = math.ceil(size[0] / objective.net.patch_size / rows) if rows else 1
    return Plan(size, latent_shape[0], settings.steps, tiles, weights,
                max(memory.argument_size_in_bytes - weights, 0), memory.temp_size_in_bytes,
                memory.output_size_in_bytes, flops(objective, latent_shape, settings))


def flops(objective: PidTeacher, latent_shape: tuple[int, ...], settings: SamplerSettings) -> Flops:
    """FLOPs of drawing latents [B, h, w, C]."""
    counted = objective.counting()
    cell = objective.net.sr_scale * objective.codec.spatial_factor
    draw, shapes = counted.drawing(latent_shape[0], *(side * cell for side in latent_shape[1:3]))

    def drawn(params, inputs, null_text):
        return draw(params, **inputs, null_text=null_text, table=settings.table,
                    scale=settings.guidance)

    return count_flops(drawn, objective.abstract_params, shapes, objective.text_shape(1))
