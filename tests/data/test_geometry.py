import numpy as np
import pytest
from PIL import Image

from pid_jax.data import geometry
from pid_jax.errors import UserError
from tests.data.sets import picture


def test_apply_is_pillow_lanczos_and_a_crop():
    placed = geometry.cover((90, 50), (32, 32))
    expected = picture(90, 50).resize(placed.resized, Image.Resampling.LANCZOS)
    x, y = placed.corner
    np.testing.assert_array_equal(placed.apply(picture(90, 50)),
                                  np.asarray(expected)[y:y + 32, x:x + 32])


def test_an_exact_fit_is_not_resampled():
    placed = geometry.cover((64, 32), (32, 32))
    assert not placed.resizes and placed.corner == (16, 0)
    np.testing.assert_array_equal(placed.apply(picture(64, 32)),
                                  np.asarray(picture(64, 32))[:, 16:48])


def test_half_pixels_round_to_even():
    assert geometry.centred((35, 32), (35, 32), (32, 32)).corner == (2, 0)
    assert geometry.centred((33, 32), (33, 32), (32, 32)).corner == (0, 0)


def test_the_rescue_is_strict():
    assert geometry.cover((9, 20), (10, 10), 0.9) is None
    placed = geometry.cover((91, 200), (100, 100), 0.9)
    assert placed.enlarges and placed.resized == (100, 220)
    assert geometry.cover((91, 200), (100, 100)) is None


def test_fractions_reach_every_position_and_stay_inside():
    corners = {geometry.at_fraction((6, 5), (6, 5), (4, 4), (f / 60, 0.999)).corner
               for f in range(60)}
    assert corners == {(0, 1), (1, 1), (2, 1)}


def test_between_goes_from_covering_to_native():
    assert geometry.between((400, 300), (30, 30), 0.0) == (40, 30)
    assert geometry.between((400, 300), (30, 30), 1.0) == (400, 300)
    middle = geometry.between((400, 300), (30, 30), 0.5)
    assert 120 <= middle[0] <= 130
    assert geometry.between((30, 30), (30, 30), 0.7) == (30, 30)
    assert geometry.between((29, 29), (30, 30), 0.7) == (30, 30)


def test_adm_crop_halves_enlarges_and_takes_the_centre():
    ramp = np.zeros((64, 96, 3), np.uint8)
    ramp[:, 32:64, 0] = 200
    crop = np.asarray(geometry.adm_crop(Image.fromarray(ramp), 16))
    assert crop.shape == (16, 16, 3)
    assert (crop[:, 5:11, 0] == 200).all() and (crop[:, [0, 15], 0] == 0).all()
    assert geometry.adm_crop(Image.fromarray(ramp[:5, :7]), 16).size == (16, 16)


def test_adm_crop_refuses_to_enlarge_beyond_measure():
    with pytest.raises(UserError, match="square of 256 pixels: all of it would be 5120000 x 256"):
        geometry.adm_crop(Image.new("RGB", (20_000, 1)), 256)
    assert geometry.adm_crop(Image.new("RGB", (20_000, 400)), 16).size == (16, 16)
