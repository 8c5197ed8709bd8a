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
from pid_jax.loading import Checkpoint, Drawer, load_checkpoint
from pid_jax.objectives.ditok_stage2 import DiTokStage2
from pid_jax.objectives.jit_c2i import JitC2I
from pid_jax.objectives.pixeldit_c2i import PixelDitC2I
from pid_jax.sampling_inputs import (check_finite, check_size, finished, fresh_noise, in_batches,
                                     padded, rows_of, seeds, starting_noise)


MOST_CLASSES = 1_000_000
"""Pictures of one command, so that a slip such as 0-99999999999 does not fill the memory."""


class ClassGenerator(Drawer):
    """Draws pictures from class numbers, spread over this process's devices.

    Attributes:
      checkpoint: weights and objective.
      devices: how many; batches that they do not divide are drawn whole on each of them.
    """

    def __init__(self, checkpoint: Checkpoint):
        mesh = Mesh(np.asarray(jax.local_devices()), ("batch",))
        self.devices = mesh.size
        self._whole, self._rows = (NamedSharding(mesh, spec) for spec in (P(), P("batch")))
        self._use(checkpoint)
        self._generate = jax.jit(self._draw, static_argnames="size")

    @classmethod
    def from_checkpoint(cls, path: str | Path, which: str = "ema",
                        lora_scale: float | None = None) -> "ClassGenerator":
        """From a checkpoint of PixelDiT or JiT; see `loading.load_checkpoint`."""
        found = load_checkpoint(path, which, (PixelDitC2I, JitC2I), lora_scale)
        if isinstance(found.objective, DiTokStage2):
            raise UserError(f"the checkpoint {found.folder} draws from tokens: use `python -m "
                            "pid_jax.tokens decode`")
        return cls(found)

    def generate(self, labels: Sequence[int], size: tuple[int, int] | None = None,
                 steps: int | None = None, seed: int | Sequence[int] = 0, *,
                 guidance: float | None = None, dtype: str = "float32",
                 batch_size: int | None = None) -> np.ndarray:
        """Draws one picture per label.

        Args:
          labels: B class numbers; the number of classes itself means "no class".
          size: (height, width) in pixels; default: that of the run's samples. Sizes that are no
            multiples of the patch size are drawn larger and cut, below and to the right.
          steps, guidance: default to those of the run's samples.
          seed: one for all or one per label.
          dtype: "float32", pictures in [-1, 1], or "uint8".
          batch_size: at most so many pictures at a time; default: all.
        Returns:
          [B, H, W, 3].
        Raises:
          UserError: labels, sizes or options that the network cannot take.
          RunFailed: the network's output is not finite.
        """
        size = check_size(size or (self.objective.sample_size,) * 2)
        whole = padded(size, self.objective.net.patch_size)
        self.objective.check_picture(*whole)
        finished(np.zeros((0, 1, 1, 3), np.float32), size, dtype)
        table = self.objective.solver_table(
            *whole, self.objective.config.sample.steps if steps is None else steps, guidance)
        inputs = (seeds(seed, len(labels)), check_labels(labels, self.objective.net.null_label))

        def draw(rows: slice) -> np.ndarray:
            chosen = rows_of(inputs, rows)
            place = self._whole if len(chosen[0]) % self.devices else self._rows
            pictures = self._generate(self._params, *jax.device_put(chosen, place), table,
                                      size=whole)
            return check_finite(pictures, "picture")

        return finished(in_batches(draw, len(labels), batch_size), size, dtype)

    def _use(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._params = jax.device_put(checkpoint.params, self._whole)

    def _test_picture(self) -> np.ndarray:
        return self.generate([0])

    def _held(self) -> Any:
        return self.checkpoint.params, self._params

    def _compiled(self) -> tuple[Any, ...]:
        return (self._generate,)

    def _draw(self, params, seeds, labels, table, *, size):
        return self.objective.draw(params, starting_noise(seeds, size), labels, table,
                                   lambda step: fresh_noise(seeds, size, step))


def sampler_note(config: ConfigDict, steps: int | None = None, guidance: float | None = None
                 ) -> dict[str, Any]:
    """Every setting of the sampler: two numbers with other settings cannot be compared."""
    options = config.sample
    both = {"steps": options.steps if steps is None else steps,
            "guidance": options.guidance if guidance is None else guidance}
    common = {"sampler": options.sampler, **both,
              "guidance_interval": list(options.guidance_interval)}
    if config.objective == "jit_c2i":
        return common | {"noise_scale": config.jit.noise_scale}
    return {**common, "rule": options.rule,
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
        found += range(int(ends[0]), min(int(ends[1]) + 1, int(ends[0]) + MOST_CLASSES))
        if len(found) >= MOST_CLASSES:
            raise UserError(f"{text!r} names too many classes for one command; name fewer than "
                            f"{MOST_CLASSES}")
    return found
