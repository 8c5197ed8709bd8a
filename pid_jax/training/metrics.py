"""What a run tells about itself: `metrics.jsonl`, TensorBoard, the progress line, a loss plot."""

import hashlib
import itertools
import json
import logging
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from pid_jax.errors import RunFailed, UserError, one_line
from pid_jax.files import atomic_write
from pid_jax.training import performance

logger = logging.getLogger(__name__)

FILE = "metrics.jsonl"
GUARDED = ("loss",)  # a run stops when one of these is not finite


def digest(keys: Iterable[str]) -> str:
    """16 hex digits that name the samples of a batch and their order."""
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]


class MetricsWriter:
    """Appends one JSON line a step, and the same numbers to TensorBoard when it is installed."""

    def __init__(self, workdir: Path, first_step: int, tensorboard: bool = True, wandb: str = ""):
        """Opens the files; lines of steps after `first_step` (an earlier, killed run) are cut.

        Args:
          wandb: project of Weights & Biases that gets the numbers too; "": none.
        """
        self.path = Path(workdir) / FILE
        truncate(self.path, first_step)
        self._file = self.path.open("a", encoding="utf-8")
        times = Path(workdir) / performance.FILE
        truncate(times, first_step)
        self._times = times.open("a", encoding="utf-8")
        self._board = _tensorboard(workdir, first_step) if tensorboard else None
        self._wandb = _wandb(workdir, wandb) if wandb else None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds the line of one step (updates done); numbers also go to TensorBoard."""
        line = {"step": step, **{k: _plain(v) for k, v in values.items()}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self.board(step, {k: v for k, v in line.items() if isinstance(v, float) and k != "time"})

    def performance(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds a line to `performance.jsonl`."""
        self._times.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
        self._times.flush()

    def board(self, step: int, values: Mapping[str, float]) -> None:
        """Sends numbers to TensorBoard and Weights & Biases only."""
        if self._wandb:
            self._wandb.log(dict(values), step=step)
        if self._board:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes both."""
        self._file.close()
        self._times.close()
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.finish()


class SilentWriter:
    """Takes the place of a `MetricsWriter` in the processes of a run that write nothing."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def performance(self, step: int, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def board(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _plain(value: Any) -> Any:
    """A JSON value: numbers that JSON lacks become text."""
    if isinstance(value, (str, int)):
        return value
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _tensorboard(workdir: Path, first_step: int):
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        logger.info("tensorboardX is not installed: numbers go to %s only", FILE)
        return None
    return SummaryWriter(str(Path(workdir) / "tensorboard"), purge_step=first_step + 1)


def _wandb(workdir: Path, project: str):
    try:
        import wandb
    except ImportError as error:
        raise UserError("config.log.wandb is set, but the package wandb is not installed: pip "
                        "install wandb, or leave it empty") from error
    place = str(Path(workdir).absolute())
    identity = hashlib.sha256(place.encode()).hexdigest()[:16]  # found again on resuming
    try:
        return wandb.init(project=project, dir=place, name=Path(place).name, id=identity,
                          resume="allow")
    except Exception as error:  # its own kinds and those of its libraries
        raise UserError(f"config.log.wandb {project!r} cannot start: "
                        f"{one_line(error, 200)}; log in with `wandb login`, set "
                        "WANDB_MODE=offline, or leave it empty") from error


def read(path: Path) -> list[dict]:
    """The lines of steps in a metrics file; what a crash cut or garbled is left out."""
    if not path.exists():
        return []
    lines = map(_parse, path.read_text(encoding="utf-8", errors="replace").splitlines())
    return [line for line in lines if isinstance(line, dict) and isinstance(line.get("step"), int)]


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def truncate(path: Path, last_step: int) -> None:
    """Keeps the lines of steps up to `last_step`, so that no step stands in the file twice."""
    if not path.exists():
        return
    kept = [line for line in read(path) if line["step"] <= last_step]
    with atomic_write(path) as file:
        file.writelines(json.dumps(line) + "\n" for line in kept)


class Progress:
    """Speed and time left, measured over the steps since the last report."""

    def __init__(self, step: int, total_steps: int, batch_size: int, peak: float | None = None):
        """Starts the clock at `step` updates done.

        Args:
          peak: FLOP/s of all devices together; None when it is not known.
        """
        self._total, self._batch, self.peak = total_steps, batch_size, peak
        self.restart(step)

    def restart(self, step: int) -> None:
        """Starts the clock again, after something that is not training."""
        self._step, self._time, self._flops = step, time.monotonic(), 0.0
        self._waited = 0.0

    def add_work(self, flops: float) -> None:
        """Counts the FLOPs of one update, for the utilisation in the next line."""
        self._flops += flops

    def add_wait(self, seconds: float) -> None:
        """Counts time in which the training waited for data."""
        self._waited += seconds

    @property
    def seconds(self) -> float:
        """Time since the clock was started."""
        return time.monotonic() - self._time

    def line(self, step: int, latest: Mapping[str, Mapping[str, Any]]) -> str:
        """`step 20/600 | loss 0.51 | grad 1.2 | lr 1e-04 | 8.1 images/s | 0:03:10 left`.

        `latest` holds the newest metrics of every phase; of several, each loss has its name. Where
        the peak of the devices is known, `41.0% MFU` (model FLOPs utilisation) follows
        the speed; `| 12% waiting for data` ends the line where it is at least 1%.
        """
        seconds = max(self.seconds, 1e-9) / max(step - self._step, 1)
        used = f" | {self._flops / (self.seconds * self.peak):.1%} MFU" if self.peak else ""
        share = self._waited / max(self.seconds, 1e-9)
        waiting = f" | {share:.0%} waiting for data" if share >= 0.01 else ""
        self.restart(step)
        left = _clock((self._total - step) * seconds)
        phases = " | ".join(_phase_text(f"{name} " if len(latest) > 1 else "", values)
                            for name, values in latest.items())
        return (f"step {step}/{self._total} | {phases} | "
                f"{self._batch / seconds:.2f} images/s{used} | {left} left{waiting}")


def _phase_text(name: str, values: Mapping[str, Any]) -> str:
    return (f"{name}loss {float(values['loss']):.4f} | grad {float(values['grad_norm']):.3g} | "
            f"lr {float(values['learning_rate']):.3g}")


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def stop_if_not_finite(step: int, values: Mapping[str, Any], last_good: int | None) -> None:
    """Ends the run when a guarded metric is not finite.

    Raises:
      RunFailed: names the step, the metric and the newest checkpoint.
    """
    for name in GUARDED:
        if not math.isfinite(float(values[name])):
            good = "there is no checkpoint" if last_good is None else (
                f"the last good checkpoint is of step {last_good}")
            raise RunFailed(f"{name} is {float(values[name])} at step {step}; {good}; lower "
                            f"config.optim.lr or look at the batch of this step in {FILE}")


def norms(values: Mapping[str, Any]) -> str:
    """The gradient norms of a step: "0.4", or "0.4 (discriminator 90.0)"."""
    others = [f"{name.removesuffix('_grad_norm')} {value}" for name, value in values.items()
              if name.endswith("_grad_norm")]
    return f"{values['grad_norm']}" + (f" ({', '.join(others)})" if others else "")


def plot(workdir: Path, names: tuple[str, ...] = ("loss", "grad_norm", "learning_rate")) -> Path:
    """Draws the curves of a run's metrics file into `plots/training.png` and returns its path.

    Each phase of the run has its own column.
    """
    lines = read(Path(workdir) / FILE)
    phases = list(dict.fromkeys(line.get("phase", "train") for line in lines)) or ["train"]
    figure, axes = pyplot.subplots(len(names), len(phases), sharex=True, squeeze=False,
                                   figsize=(8 * len(phases), 3 * len(names)))
    for (row, name), (column, phase) in itertools.product(enumerate(names), enumerate(phases)):
        points = [(line["step"], line[name]) for line in lines
                  if line.get("phase", "train") == phase and _is_number(line.get(name))]
        _curve(axes[row, column], name if len(phases) == 1 else f"{phase} {name}", points)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.tight_layout()
    path = Path(workdir) / "plots" / "training.png"
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=100)
    pyplot.close(figure)
    return path


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _curve(axis, name: str, points: list[tuple[int, float]]) -> None:
    axis.set_ylabel(name)
    axis.grid(alpha=0.3)
    if not points:
        return
    steps, values = zip(*points)
    axis.plot(steps, values, linewidth=0.5, alpha=0.5)
    axis.plot(steps, smooth(values), linewidth=1.5)


def smooth(values: Iterable[float], window: float = 0.02) -> list[float]:
    """Exponential average over about `window` of the series, unbiased at its start."""
    values = list(values)
    decay = 1 - 1 / max(1.0, window * len(values))
    total = weight = 0.0
    result = []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        result.append(total / weight)
    return result
