import pytest

from pid_jax.data.buckets import (CustomSizes, MultiResolution, SingleResolution, assign,
                                  build_layout, parse_size)
from pid_jax.errors import UserError


def test_square_takes_every_picture_that_covers_it():
    layout = build_layout("square", 64)
    assert [b.size for b in layout.buckets] == [(64, 64)]
    assert assign(layout, (64, 900)).name == "64x64"
    assert assign(layout, (58, 900)).name == "64x64"  # enlarged: 58 / 64 > 0.9
    assert assign(layout, (57, 900)) is None


def test_custom_sizes_prefer_the_shape_then_the_largest_that_fits():
    layout = build_layout("custom", 0, ("256x256", "512x512", "384x256"))
    assert assign(layout, (1000, 1000)).name == "512x512"
    assert assign(layout, (300, 310)).name == "256x256"
    assert assign(layout, (900, 600)).name == "384x256"
    assert assign(layout, (100, 100)) is None


def test_multi_resolution_merges_equal_sizes_and_never_enlarges():
    layout = MultiResolution(3840)
    assert len({b.size for b in layout.buckets}) == len(layout.buckets)
    assert len({b.name for b in layout.buckets}) == len(layout.buckets)
    assert assign(layout, (9000, 9000)).name == "L3840_1,1"
    assert assign(layout, (2047, 2047)) is None


def test_single_resolution_has_seven_ratios():
    assert len(SingleResolution(2048).buckets) == 7


@pytest.mark.parametrize("kind, size, sizes, message", [
    ("triangle", 64, (), "triangle"), ("single", 640, (), "640"), ("multi", 2048, (), "2048"),
    ("custom", 64, (), "at least one"), ("custom", 64, ("64",), "WIDTHxHEIGHT"),
    ("square", 64, ("64x64",), "for custom buckets"), ("square", 0, (), "0x0"),
    ("square", -5, (), "-5x-5")])
def test_impossible_layouts(kind, size, sizes, message):
    with pytest.raises(UserError, match=message):
        build_layout(kind, size, sizes)


@pytest.mark.parametrize("text", ["", "x", "12", "1x2x3", "axb", "-1x5", "0x4", "1.5x2", "²x²"])
def test_malformed_sizes(text):
    with pytest.raises(UserError):
        parse_size(text)


def test_duplicate_custom_sizes_count_once():
    assert len(CustomSizes([(64, 64), (64, 64)]).buckets) == 1
