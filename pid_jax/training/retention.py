"""Which checkpoints stay on the disk, and which of them is the best."""

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pid_jax.errors import UserError
from pid_jax.files import atomic_write

logger = logging.getLogger(__name__)

BEST = "best.json"
LOWER_IS_BETTER = ("de2000", "lq_de2000", "lpips", "artefact")


@dataclasses.dataclass
class Retention:
    """Orbax's preservation policy of a run.

    Attributes:
      latest: this many of the newest stay.
      every: so do all whose step it divides; 0: none for that reason.
      metric: score of the samples (`psnr_sample` ...) whose best checkpoint stays; "": none.
      best: that checkpoint's `step`, `metric` and `value`, once there is one.
    """

    latest: int
    every: int = 0
    metric: str = ""
    best: dict[str, Any] | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """One answer for each checkpoint, by its `step`."""
        steps = [info.step for info in checkpoints]
        newest = sorted(steps)[-self.latest:]
        best = self.best["step"] if self.best else None
        return [step in newest or step == best or bool(self.every and step % self.every == 0)
                for step in steps]

    def load(self, workdir: Path, steps: Sequence[int]) -> None:
        """Reads the record of an earlier start, if its checkpoint is among `steps`.

        Raises:
          UserError: the file is no such record.
        """
        path = workdir / BEST
        if not path.exists():
            return
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            step, metric, _ = record["step"], record["metric"], float(record["value"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} does not say which checkpoint is the best ({error!r}); bring "
                            "it back, or remove it to look for the best one anew") from error
        if metric == self.metric and step in steps:
            self.best = record

    def offer(self, workdir: Path, step: int, scores: Mapping[str, float]) -> bool:
        """Takes a checkpoint of this step as the best one if its score is; writes `best.json`."""
        if self.metric not in scores:
            if self.metric and scores:
                logger.warning("config.checkpoint.best is %r, which the samples have no score for; "
                               "they have %s", self.metric, ", ".join(scores))
            return False
        value = scores[self.metric]
        if self.best is not None and not self._better(value, self.best["value"]):
            return False
        self.best = {"step": step, "metric": self.metric, "value": value}
        with atomic_write(workdir / BEST) as file:
            file.write(json.dumps(self.best, indent=2) + "\n")
        logger.info("best checkpoint so far: step %d, %s %.3f", step, self.metric, value)
        return True

    def _better(self, value: float, than: float) -> bool:
        return value < than if self.metric.startswith(LOWER_IS_BETTER) else value > than
