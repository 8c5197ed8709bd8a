"""Buckets: the few picture sizes that a training run compiles, and which picture goes where.

`SingleResolution` and `MultiResolution` are the reference's two layouts (spec: golden I01);
`CustomSizes` is a list of one's own sizes, of which one square is the simplest. Ratios are named
"width,height". Sizes are (width, height) in pixels.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Protocol

from pid_jax.data.geometry import Size, cover, cover_scale
from pid_jax.errors import UserError

# Landscape and square sizes of every resolution; portrait ones are the same, turned.
_LANDSCAPE = {
    1024: {"1,1": (1024, 1024), "4,3": (1152, 896), "16,9": (1344, 768), "3,2": (1344, 896)},
    2048: {"1,1": (2048, 2048), "4,3": (2304, 1728), "16,9": (2688, 1536), "3,2": (2688, 1792)},
    3072: {"1,1": (3072, 3072), "4,3": (3520, 2688), "16,9": (4096, 2304), "3,2": (3776, 2496)},
    3840: {"1,1": (3584, 3584), "4,3": (4096, 2816), "16,9": (4096, 2176), "3,2": (4096, 2688)},
    4096: {"1,1": (4096, 4096), "4,3": (4096, 3072), "16,9": (4096, 2304), "3,2": (4096, 2688)},
}

# The order decides ties.
SINGLE_RATIOS = ("16,9", "3,2", "4,3", "1,1", "3,4", "2,3", "9,16")
MULTI_RATIOS = ("16,9", "4,3", "1,1", "3,4", "9,16")
FOLDER_RATIOS = ("21,9", *SINGLE_RATIOS)

MULTI_LOWEST, MULTI_STEP, MULTI_MULTIPLE = 2048, 256, 64
MULTI_MAXIMA = (3072, 3840, 4096)
RESCUE_SCALE = 0.9


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One compiled picture size. `name` is unique within a layout."""

    name: str
    width: int
    height: int

    @property
    def size(self) -> Size:
        return self.width, self.height


class Layout(Protocol):
    """All buckets of a run and the choice among them.

    Attributes:
      buckets: every bucket, in a fixed order.
      min_scale: see `geometry.cover`.
    """

    buckets: tuple[Bucket, ...]
    min_scale: float

    def candidate(self, native: Size) -> Bucket | None:
        """The bucket that suits the shape of a picture, even when the picture is too small."""


def assign(layout: Layout, native: Size) -> Bucket | None:
    """The bucket of a picture of size `native`, or None when the picture is too small for it."""
    bucket = layout.candidate(native)
    fits = bucket and cover(native, bucket.size, layout.min_scale)
    return bucket if fits else None


class SingleResolution:
    """Seven aspect ratios at one resolution (1024, 2048, 3072, 3840 or 4096)."""

    min_scale = RESCUE_SCALE

    def __init__(self, resolution: int):
        _check_resolution(resolution, SIZES)
        self.buckets = tuple(Bucket(r, *SIZES[resolution][r]) for r in SINGLE_RATIOS)
        self._by_ratio = {b.name: b for b in self.buckets}

    def candidate(self, native: Size) -> Bucket:
        return self._by_ratio[nearest_ratio(native, SINGLE_RATIOS)]


class MultiResolution:
    """Five aspect ratios at levels 2048, 2304, ... up to `maximum` (3072, 3840 or 4096).

    A picture goes to the largest level that it covers; smaller ones are dropped, none enlarged.
    """

    min_scale = 1.0

    def __init__(self, maximum: int):
        _check_resolution(maximum, MULTI_MAXIMA)
        self._levels = {r: _distinct(multi_levels(maximum, r)) for r in MULTI_RATIOS}
        self.buckets = tuple(b for levels in self._levels.values() for b in levels)

    def candidate(self, native: Size) -> Bucket | None:
        levels = self._levels[nearest_ratio(native, MULTI_RATIOS)]
        return next((b for b in levels if cover_scale(native, b.size) >= 1), None)


class CustomSizes:
    """One's own sizes: each picture goes to the one nearest in aspect ratio, then the largest
    that it covers."""

    def __init__(self, sizes: Iterable[Size], min_scale: float = RESCUE_SCALE):
        self.min_scale = min_scale
        self.buckets = tuple(Bucket(f"{w}x{h}", w, h) for w, h in dict.fromkeys(sizes))
        if not self.buckets:
            raise UserError("custom buckets need at least one size, such as '256x256'")

    def candidate(self, native: Size) -> Bucket:
        return _nearest(native, self.buckets, self.min_scale)


class Fewer:
    """At most so many buckets of another layout; pictures of the others go to what is left, by
    shape, then to the largest that they cover."""

    def __init__(self, layout: Layout, natives: Iterable[Size], most: int):
        """Args:
          layout: all buckets.
          natives: sizes of the pictures; the buckets that most of them go to are kept.
          most: how many.
        """
        counts: collections.Counter[Bucket | None] = collections.Counter()
        for native, count in collections.Counter(natives).items():
            counts[assign(layout, native)] += count
        kept = sorted(layout.buckets, key=lambda b: -counts[b])[:most]
        self._layout, self.min_scale = layout, layout.min_scale
        self.buckets = tuple(b for b in layout.buckets if b in kept)

    def candidate(self, native: Size) -> Bucket:
        bucket = self._layout.candidate(native)
        return bucket if bucket in self.buckets else _nearest(native, self.buckets, self.min_scale)


def build_layout(kind: str, image_size: int, sizes: Iterable[str] = ()) -> Layout:
    """The layout of a config.

    Args:
      kind: "square" (one bucket, image_size x image_size), "single" or "multi" (the reference's,
        with image_size the resolution or the highest level) or "custom" (`sizes`).
      image_size: pixels.
      sizes: for "custom": "WIDTHxHEIGHT" each.
    Raises:
      UserError: unknown kind, a resolution the layout does not have, a malformed size, sizes that
        the kind would not use.
    """
    if sizes and kind != "custom":
        raise UserError(f"sizes {tuple(sizes)!r} are for custom buckets, but the layout is "
                        f"{kind!r}; set buckets to custom, or leave sizes empty")
    if kind == "square":
        return CustomSizes([parse_size(f"{image_size}x{image_size}")])
    if kind == "custom":
        return CustomSizes(map(parse_size, sizes))
    if kind in ("single", "multi"):
        return (SingleResolution if kind == "single" else MultiResolution)(image_size)
    raise UserError(f"unknown bucket layout {kind!r}; choose square, single, multi or custom")


def parse_size(text: str) -> Size:
    """"384x256" -> (384, 256). Raises UserError for anything else."""
    parts = str(text).lower().split("x")
    if len(parts) != 2 or not all(p.isascii() and p.isdigit() and int(p) > 0 for p in parts):
        raise UserError(f"{text!r} is not a picture size; write WIDTHxHEIGHT, such as '384x256'")
    return int(parts[0]), int(parts[1])


def nearest_ratio(native: Size, ratios: Iterable[str]) -> str:
    """The ratio nearest in |log|; the first of equals."""
    return min(ratios, key=lambda r: _log_distance(native, _pair(r)))


def folder_ratio(native: Size) -> str:
    """The ratio by which the reference's sharding names `aspect_ratio_X_Y` folders.

    It knows 21,9, whose folder the reference's training never reads.
    """
    return nearest_ratio(native, FOLDER_RATIOS)


def multi_levels(maximum: int, ratio: str) -> list[Bucket]:
    """Every level of one ratio, highest first; levels that clipping made equal are all listed."""
    limit = SIZES[maximum][ratio]
    stretch = math.sqrt(_value(ratio))
    levels = range(MULTI_LOWEST, maximum + 1, MULTI_STEP)
    return [Bucket(f"L{level}_{ratio}", min(_to_multiple(level * stretch), limit[0]),
                   min(_to_multiple(level / stretch), limit[1])) for level in reversed(levels)]


def _nearest(native: Size, buckets: Iterable[Bucket], min_scale: float) -> Bucket:
    """The bucket of the nearest shape; of several, the largest that is covered."""
    return min(buckets, key=lambda b: (
        _log_distance(native, b.size), not cover(native, b.size, min_scale), -b.width * b.height))


def _distinct(levels: list[Bucket]) -> list[Bucket]:
    """One bucket for each size: the highest level gives the name."""
    first: dict[Size, Bucket] = {}
    for bucket in levels:
        first.setdefault(bucket.size, bucket)
    return list(first.values())


def _to_multiple(length: float) -> int:
    return round(length / MULTI_MULTIPLE) * MULTI_MULTIPLE


@functools.cache
def _pair(ratio: str) -> Size:
    width, height = ratio.split(",")
    return int(width), int(height)


def _value(ratio: str) -> float:
    width, height = _pair(ratio)
    return width / height


def _log_distance(native: Size, other: Size) -> float:
    return abs(math.log(native[0] / native[1]) - math.log(other[0] / other[1]))


def _check_resolution(resolution: int, known: Iterable[int]) -> None:
    if resolution not in known:
        raise UserError(f"these buckets exist for {', '.join(map(str, known))} pixels, not for "
                        f"{resolution!r}; for other sizes use square or custom buckets")


def _with_portraits(landscape: dict[str, Size]) -> dict[str, Size]:
    turned = {",".join(reversed(r.split(","))): (h, w) for r, (w, h) in landscape.items()}
    return landscape | turned


SIZES: dict[int, dict[str, Size]] = {
    resolution: _with_portraits(sizes) for resolution, sizes in _LANDSCAPE.items()}
