"""Curves of scores: against the step, against guidance, one line for each set of weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from pid_jax.files import atomic_write


SHOWN = ("fid", "sfid", "inception_score", "precision", "recall", "pixel_frechet")
AXES = ("guidance", "step")


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws every score that the results have against guidance where it varies, else the step."""
    names = [name for name in SHOWN if any(name in result["scores"] for result in results)]
    axis_name = next((axis for axis in AXES if len({r.get(axis) for r in results}) > 1), "step")
    figure, axes = pyplot.subplots(max(1, len(names)), 1, squeeze=False, sharex=True,
                                   figsize=(7, 2.5 * max(1, len(names))))
    for axis, name in zip(axes[:, 0], names):
        lines = _lines(results, name, axis_name)
        for group, points in lines.items():
            axis.plot(*zip(*sorted(points)), marker="o", label=group)
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
        if lines:
            axis.legend(fontsize="small")
    axes[-1, 0].set_xlabel(axis_name)
    figure.tight_layout()
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=100)
    pyplot.close(figure)


def _lines(results: Sequence[dict[str, Any]], name: str, axis: str
           ) -> dict[str, list[tuple[float, float]]]:
    """Points by the line that they belong to: weights, and whichever of AXES is not the axis."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        if name in result["scores"] and result.get(axis) is not None:
            other = [f"{key} {result[key]}" for key in AXES
                     if key != axis and result.get(key) is not None]
            group = ", ".join([str(result.get("weights", "pictures")), *other])
            lines.setdefault(group, []).append((result[axis], result["scores"][name]))
    return lines
