"""The evaluations of a run over its steps: written as they are made, read back as a small API.

    DIR/evaluation_history/eval_step00003000.json         one evaluation, whole
    DIR/evaluation_history/comparison_step00003000.png    pictures beside their originals
    DIR/evaluation_history/evaluation_summary.jsonl       one line an evaluation, by step

    for evaluation in read_history("runs/ditok"):
        print(evaluation.step, evaluation.metrics["psnr"])
"""

import csv
import dataclasses
import io
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pid_jax import pictures
from pid_jax.errors import UserError
from pid_jax.files import atomic_write

FOLDER = "evaluation_history"
SUMMARY = "evaluation_summary.jsonl"
LOWER_IS_BETTER = ("rfid", "lpips", "bpp", "entropy_coded_bpp")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One evaluation.

    Attributes:
      step: updates done.
      metrics: name -> number.
      unavailable: name -> why it could not be measured.
      note: whatever else was written (weights, number of pictures, settings).
    """

    step: int
    metrics: Mapping[str, float]
    unavailable: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def record(folder: Path, evaluation: Evaluation, comparison: np.ndarray | None = None) -> Path:
    """Writes an evaluation, replacing one of the same step.

    Args:
      folder: of the run; its history lies in a folder below it.
      comparison: a sheet uint8 [H, W, 3].
    Returns:
      The path of the JSON file.
    """
    _check_finite(evaluation)
    target = Path(folder) / FOLDER
    line = {"step": evaluation.step, "time": round(time.time(), 3), **evaluation.metrics}
    if comparison is not None:
        name = f"comparison_step{evaluation.step:08d}.png"
        pictures.save_png(target / name, comparison)
        line["comparison"] = name
    path = target / f"eval_step{evaluation.step:08d}.json"
    with atomic_write(path) as file:
        json.dump({**line, "metrics": dict(evaluation.metrics),
                   "unavailable": dict(evaluation.unavailable), "note": dict(evaluation.note)},
                  file, indent=2)
    _write_summary(target, line)
    return path


def _check_finite(evaluation: Evaluation) -> None:
    wrong = [name for name, value in evaluation.metrics.items() if not math.isfinite(value)]
    if wrong:
        raise UserError(f"the evaluation of step {evaluation.step} has values that are not finite: "
                        f"{', '.join(wrong)}")


def _write_summary(folder: Path, line: Mapping[str, Any]) -> None:
    lines = {entry["step"]: entry for entry in _summary_lines(folder)} | {line["step"]: line}
    with atomic_write(folder / SUMMARY) as file:
        file.writelines(json.dumps(lines[step]) + "\n" for step in sorted(lines))


def _summary_lines(folder: Path) -> list[dict]:
    path = folder / SUMMARY
    if not path.is_file():
        return []
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if isinstance(line["step"], int)]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}; remove it, the evaluations themselves are "
                        "in the files beside it") from error


def read_history(folder: str | Path) -> list[Evaluation]:
    """All evaluations of a run, by step.

    Args:
      folder: the run's, or its history folder itself.
    Raises:
      UserError: there is none, or a file is damaged.
    """
    folder = Path(folder)
    inside = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    files = sorted(inside.glob("eval_step*.json"))
    if not files:
        raise UserError(f"{folder} holds no evaluations; expected {FOLDER}/eval_stepNNNNNNNN.json, "
                        "written by training or by `python -m pid_jax.evaluate_tokens`")
    return sorted((_read(file) for file in files), key=lambda evaluation: evaluation.step)


def _read(path: Path) -> Evaluation:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        metrics = {name: float(value) for name, value in content["metrics"].items()}
        if type(content["step"]) is not int or not all(map(math.isfinite, metrics.values())):
            raise ValueError("its step is no whole number, or a metric not finite")
        return Evaluation(content["step"], metrics, dict(content["unavailable"]),
                          dict(content["note"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"the evaluation {path} is damaged: {error}; remove it") from error


def metric_names(history: Sequence[Evaluation]) -> list[str]:
    """Every metric of any evaluation, in the order of their first appearance."""
    return list(dict.fromkeys(name for evaluation in history for name in evaluation.metrics))


def with_metric(history: Sequence[Evaluation], metric: str) -> list[Evaluation]:
    """The evaluations that have a metric; UserError when none has."""
    found = [evaluation for evaluation in history if metric in evaluation.metrics]
    if not found:
        raise UserError(f"no evaluation has the metric {metric!r}; there are "
                        f"{', '.join(metric_names(history))}")
    return found


def lower_is_better(metric: str) -> bool:
    """Whether small values of a metric are good."""
    return metric.startswith(LOWER_IS_BETTER)


def best(history: Sequence[Evaluation], metric: str, count: int) -> list[Evaluation]:
    """The `count` best evaluations by a metric, the best first."""
    ranked = sorted(with_metric(history, metric),
                    key=lambda evaluation: (evaluation.metrics[metric], evaluation.step),
                    reverse=not lower_is_better(metric))
    return ranked[:count]


@dataclasses.dataclass(frozen=True)
class Trend:
    """How a metric moved from the first to the last evaluation that has it.

    Attributes:
      first, last: (step, value).
      change: last - first.
      percent: change in percent of the first value; None where that is 0.
      improved: whether the change is to the better.
    """

    first: tuple[int, float]
    last: tuple[int, float]
    change: float
    percent: float | None
    improved: bool


def trend(history: Sequence[Evaluation], metric: str) -> Trend:
    """The trend of a metric."""
    found = with_metric(history, metric)
    first, last = ((e.step, e.metrics[metric]) for e in (found[0], found[-1]))
    change = last[1] - first[1]
    percent = 100 * change / abs(first[1]) if first[1] else None
    improved = change < 0 if lower_is_better(metric) else change > 0
    return Trend(first, last, change, percent, improved)


def to_csv(history: Sequence[Evaluation]) -> str:
    """A table with a row for each evaluation; empty where a metric was not measured."""
    names, buffer = metric_names(history), io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["step", *names])
    for evaluation in history:
        writer.writerow([evaluation.step, *(evaluation.metrics.get(name, "") for name in names)])
    return buffer.getvalue()
