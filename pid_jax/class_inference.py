"""Drawing pictures of classes with a class-conditional checkpoint.

    generator = ClassGenerator.from_checkpoint("runs/digits/run")
    pictures = generator.generate([3, 3, 7], seed=[0, 1, 2])

It compiles once per batch shape and step count. Every picture has its own seed and does not depend
on what it is drawn together with.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from pid_jax.errors import UserError
from pid_jax.inference import (STEP_NOISE, Checkpoint, check_finite, load_checkpoint, seeds,
                               starting_noise)
from pid_jax.objectives.ditok_stage2 import DiTokStage2
from pid_jax.objectives.jit_c2i import JitC2I
from pid_jax.objectives.pixeldit_c2i import PixelDitC2I


class ClassGenerator:
    """Draws pictures from class numbers, spread over this process's devices.

    Attributes:
      checkpoint: weights and objective.
      devices: how many; batches that they do not divide are drawn whole on each of them.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        mesh = Mesh(np.asarray(jax.local_devices()), ("batch",))
        self.devices = mesh.size
        self._whole, self._rows = (NamedSharding(mesh, spec) for spec in (P(), P("batch")))
        self._params = jax.device_put(checkpoint.params, self._whole)
        self._generate = jax.jit(self._draw, static_argnames="size")

    @classmethod
    def from_checkpoint(cls, path: str | Path, which: str = "ema",
                        lora_scale: float | None = None) -> "ClassGenerator":
        """From a checkpoint of PixelDiT or JiT; see `inference.load_checkpoint`."""
        found = load_checkpoint(path, which, (PixelDitC2I, JitC2I), lora_scale)
        if isinstance(found.objective, DiTokStage2):
            raise UserError(f"the checkpoint {found.folder} draws from tokens: use `python -m "
                            "pid_jax.tokens decode`")
        return cls(found)

    @property
    def objective(self) -> PixelDitC2I | JitC2I:
        """The run's objective."""
        return self.checkpoint.objective

    def generate(self, labels: Sequence[int], size: tuple[int, int] | None = None,
                 steps: int | None = None, guidance: float | None = None,
                 seed: int | Sequence[int] = 0) -> np.ndarray:
        """Draws one picture per label.

        Args:
          labels: B class numbers; the number of classes itself means "no class".
          size: (height, width) in pixels; default: that of the run's samples.
          steps, guidance: default to those of the run's samples.
          seed: one for all or one per label.
        Returns:
          float32 [B, H, W, 3] in [-1, 1].
        Raises:
          UserError: labels, sizes or options that the network cannot take.
          RunFailed: the network's output is not finite.
        """
        size = size or (self.objective.sample_size,) * 2
        self.objective.check_picture(*size)
        table = self.objective.solver_table(
            *size, self.objective.config.sample.steps if steps is None else steps, guidance)
        rows = (seeds(seed, len(labels)), check_labels(labels, self.objective.net.null_label))
        place = self._whole if len(labels) % self.devices else self._rows
        pictures = self._generate(self._params, *jax.device_put(rows, place), table, size=size)
        return check_finite(pictures, "picture")

    def _draw(self, params, seeds, labels, table, *, size):
        def step_noise(step):
            return jax.vmap(lambda seed: jax.random.normal(jax.random.fold_in(jax.random.fold_in(
                jax.random.key(seed), STEP_NOISE), step), (*size, 3)))(seeds)

        return self.objective.draw(params, starting_noise(seeds, size), labels, table, step_noise)


def sampler_note(config: ConfigDict, steps: int | None = None, guidance: float | None = None
                 ) -> dict[str, Any]:
    """Every setting of the sampler: two numbers with other settings cannot be compared."""
    options = config.sample
    both = {"steps": options.steps if steps is None else steps,
            "guidance": options.guidance if guidance is None else guidance}
    if config.objective == "jit_c2i":
        return {"sampler": config.jit.method, **both,
                "guidance_interval": list(config.jit.interval)}
    return {"sampler": options.sampler, "rule": options.rule, **both,
            "guidance_interval": list(options.guidance_interval),
            "shift": config.flow.shift if options.shift is None else options.shift,
            "last_step": options.last_step}


def check_labels(labels: Sequence[int], null_label: int) -> np.ndarray:
    """int32 [B]; UserError for a number that is no class of the network."""
    for label in labels:
        if not 0 <= label <= null_label:
            raise UserError(f"class {label} is none of the network's: they are 0 to "
                            f"{null_label - 1}, and {null_label} for none")
    return np.asarray(labels, np.int32)


def parse_classes(text: str) -> list[int]:
    """"0-2,7,7" -> [0, 1, 2, 7, 7]; UserError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isascii() and end.isdigit() for end in ends) or int(ends[0]) > int(ends[1]):
            raise UserError(f"{text!r} names no classes; write numbers and ranges such as 0-9,207")
        found += range(int(ends[0]), int(ends[1]) + 1)
    return found
