"""Histograms of a data set as one picture: sizes, aspect ratios, buckets, caption lengths."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib import pyplot

from pid_jax.data.buckets import FOLDER_RATIOS
from pid_jax.data.index import Index
from pid_jax.files import atomic_write

MOST_BUCKETS = 24
COLOUR, OTHER = "#4477aa", "#bbbbbb"


def draw(index: Index, buckets: Mapping[str, int], path: Path) -> None:
    """Writes the PNG.

    Args:
      index: of the data set.
      buckets: records of each bucket of a layout, the fullest first; "too small" among them.
      path: where to.
    """
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8))
    _sizes(axes[0, 0], index)
    _ratios(axes[0, 1], index)
    _buckets(axes[1, 0], buckets)
    _captions(axes[1, 1], index)
    for axis in (axes[0, 0].yaxis, axes[0, 1].yaxis, axes[1, 0].xaxis, axes[1, 1].yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.tight_layout()
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=100)
    pyplot.close(figure)


def _sizes(axis: pyplot.Axes, index: Index) -> None:
    longest = np.maximum(index.width, index.height)
    shortest = np.minimum(index.width, index.height)
    edges = _log_edges(shortest.min(), longest.max())
    axis.hist(shortest, edges, color=COLOUR, alpha=0.7, label="shorter side")
    axis.hist(longest, edges, color="#cc6677", histtype="step", linewidth=1.5,
              label="longer side")
    axis.set(xscale="log", xlabel="pixels", ylabel="pictures", title="Sizes")
    _plain_ticks(axis, np.concatenate([shortest, longest]))
    axis.legend()


def _ratios(axis: pyplot.Axes, index: Index) -> None:
    ratio = index.width / index.height
    axis.hist(ratio, _log_edges(min(ratio.min(), 0.5), max(ratio.max(), 2.4)), color=COLOUR)
    axis.set(xscale="log", xlabel="width : height (ticks at the reference's ratios)",
             ylabel="pictures", title="Aspect ratios")
    pairs = [tuple(map(int, name.split(","))) for name in FOLDER_RATIOS]
    axis.set_xticks([w / h for w, h in pairs], [f"{w}:{h}" for w, h in pairs], fontsize="small",
                    rotation=45)
    axis.minorticks_off()


def _buckets(axis: pyplot.Axes, buckets: Mapping[str, int]) -> None:
    shown = list(buckets.items())[:MOST_BUCKETS]
    if rest := sum(list(buckets.values())[MOST_BUCKETS:]):
        shown.append((f"{len(buckets) - MOST_BUCKETS} others", rest))
    names, counts = zip(*reversed(shown))
    bars = axis.barh(names, counts, color=[OTHER if n == "too small" else COLOUR for n in names])
    axis.bar_label(bars, fontsize="small", padding=2)
    axis.tick_params("y", labelsize="small")
    axis.margins(x=0.12)
    axis.set(xlabel="pictures", title="Buckets")


def _captions(axis: pyplot.Axes, index: Index) -> None:
    axis.hist(index.caption_length, min(50, max(5, int(index.caption_length.max()) + 1)),
              color=COLOUR)
    without = int(np.sum(index.caption_length == 0))
    axis.set(xlabel=f"characters of the longest caption ({without} pictures without)",
             ylabel="pictures", title="Caption lengths")


def _log_edges(low: float, high: float) -> np.ndarray:
    return np.geomspace(low * 0.95, high * 1.05, 41)


def _plain_ticks(axis: pyplot.Axes, values: np.ndarray) -> None:
    """Powers of two and the sizes half-way, as plain numbers."""
    exponents = np.arange(0, 17)
    ticks = np.sort(np.concatenate([2**exponents, 3 * 2**exponents // 2]))
    ticks = [t for t in ticks if values.min() * 0.9 <= t <= values.max() * 1.1]
    axis.set_xticks(ticks, [str(t) for t in ticks], fontsize="small", rotation=45)
    axis.minorticks_off()
