"""The picture sizes that a checkpoint was trained on, and a word about others."""

import math

from ml_collections import ConfigDict

from pid_jax.data.buckets import build_layout

TOLERANCE = 1.02  # of areas and ratios: rounding to cells is no leaving of the range


def departure(config: ConfigDict, height: int, width: int) -> str | None:
    """The sentence for a picture size outside of what `config.data` trains on; None inside.

    Args:
      height, width: in pixels.
    """
    options = config.data
    sizes = [bucket.size for bucket in build_layout(options.buckets, options.image_size,
                                                    options.sizes).buckets]
    areas = sorted(math.sqrt(w * h) for w, h in sizes)
    ratios = sorted(w / h for w, h in sizes)
    side, ratio = math.sqrt(height * width), width / height
    inside = (areas[0] / TOLERANCE <= side <= areas[-1] * TOLERANCE
              and ratios[0] / TOLERANCE <= ratio <= ratios[-1] * TOLERANCE)
    if inside:
        return None
    return (f"pictures of {width} x {height} (width x height) lie outside of what this checkpoint "
            f"was trained on: areas of {_span(areas[0], areas[-1], '.0f', '^2')} pixels, width / "
            f"height {_span(ratios[0], ratios[-1], '.2f')}; expect artefacts")


def _span(low: float, high: float, form: str, unit: str = "") -> str:
    ends = dict.fromkeys((f"{low:{form}}{unit}", f"{high:{form}}{unit}"))
    return " to ".join(ends)
