"""Grid functions against their definitions, written as loops."""

import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.models import spatial


def picture(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_space_to_channels_orders_channel_row_column():
    x = picture(2, 6, 4, 3)
    out = np.asarray(spatial.space_to_channels(x, 2))
    assert out.shape == (2, 3, 2, 12)
    for channel in range(3):
        for row in range(2):
            for column in range(2):
                expected = x[:, row::2, column::2, channel]
                np.testing.assert_array_equal(out[..., (channel * 2 + row) * 2 + column], expected)


def test_channels_to_space_undoes_space_to_channels():
    x = picture(1, 6, 9, 2)
    np.testing.assert_array_equal(spatial.channels_to_space(spatial.space_to_channels(x, 3), 3), x)


@pytest.mark.parametrize("size_in, size_out", [(4, 7), (7, 4), (3, 12), (1, 5), (5, 5), (128, 384)])
def test_nearest_takes_floor_of_the_scaled_index(size_in, size_out):
    expected = [i * size_in // size_out for i in range(size_out)]
    np.testing.assert_array_equal(spatial.nearest_index(size_in, size_out), expected)


def test_nearest_keeps_the_float32_rounding_of_torch():
    """In exact arithmetic output 41 of 82 reads cell 1 of 2; torch reads cell 0."""
    index = spatial.nearest_index(2, 82)
    assert index[41] == 0 and index[42] == 1


def test_resize_nearest_treats_each_axis_by_itself():
    x = picture(2, 2, 3, 4)
    out = np.asarray(spatial.resize_nearest(x, (5, 3)))
    np.testing.assert_array_equal(out, x[:, [0, 0, 0, 1, 1]])


def linear_by_hand(line, size_out):
    """align_corners=False, one axis, float64."""
    size_in, out = len(line), []
    for i in range(size_out):
        position = max((i + 0.5) * size_in / size_out - 0.5, 0.0)
        low = min(int(position), size_in - 1)
        high, weight = min(low + 1, size_in - 1), position - low
        out.append((1 - weight) * line[low] + weight * line[high])
    return np.stack(out)


@pytest.mark.parametrize("size", [(3, 5), (8, 9), (4, 2), (1, 7)])
def test_resize_bilinear_is_the_textbook_one(size):
    x = picture(2, 4, 7, 3)
    rows = linear_by_hand(np.moveaxis(x.astype(np.float64), 1, 0), size[0])
    both = linear_by_hand(np.moveaxis(rows, 2, 0), size[1])
    expected = both.transpose(2, 1, 0, 3)
    np.testing.assert_allclose(spatial.resize_bilinear(x, size), expected, atol=2e-6)


def test_resize_to_the_same_size_changes_nothing():
    x = picture(1, 3, 4, 2)
    np.testing.assert_array_equal(spatial.resize_bilinear(x, (3, 4)), x)
    np.testing.assert_array_equal(spatial.resize_nearest(x, (3, 4)), x)


@pytest.mark.parametrize("mode, border", [
    ("zeros", [0, 1, 2, 3, 0]), ("replicate", [1, 1, 2, 3, 3]), ("reflect", [2, 1, 2, 3, 2]),
    ("circular", [3, 1, 2, 3, 1])])
def test_pad_border_modes(mode, border):
    line = np.array([1.0, 2.0, 3.0], np.float32)
    row = spatial.pad_border(np.tile(line, (1, 3, 1))[..., None], 1, mode)[0, 1, :, 0]
    column = spatial.pad_border(np.tile(line[:, None], (1, 1, 3))[..., None], 1, mode)[0, :, 1, 0]
    np.testing.assert_array_equal(row, border)
    np.testing.assert_array_equal(column, border)


def test_reflect_needs_two_rows():
    with pytest.raises(UserError, match="reflect padding .* this one is 1x4"):
        spatial.pad_border(picture(1, 1, 4, 2), 1, "reflect")


def test_unknown_padding_mode_names_the_known_ones():
    with pytest.raises(UserError, match="'mirror'; choose one of zeros, replicate"):
        spatial.pad_border(picture(1, 3, 4, 2), 1, "mirror")


def test_indivisible_sizes_are_refused():
    with pytest.raises(UserError, match="5x4 cannot be folded in cells of 2x2"):
        spatial.space_to_channels(picture(1, 5, 4, 2), 2)
    with pytest.raises(UserError, match="6 channels cannot be unfolded"):
        spatial.channels_to_space(picture(1, 2, 2, 6), 2)
