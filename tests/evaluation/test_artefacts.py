import numpy as np
import pytest
from PIL import Image

from pid_jax.data.photos import _photo_folder
from pid_jax.errors import UserError
from pid_jax.evaluation.artefacts import patch_artefacts
from pid_jax.evaluation.scores import artefact_scores

PHOTOS = ("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg", "retina.jpg", "grass.png",
          "gravel.png", "camera.png", "ihc.png")


def photo(name):
    return np.asarray(Image.open(_photo_folder() / name).convert("RGB"))[None, :288, :384]


@pytest.mark.parametrize("name", PHOTOS)
@pytest.mark.parametrize("period", [8, 16])
def test_photographs_are_not_flagged(name, period):
    assert not patch_artefacts(photo(name), period).flagged


@pytest.mark.parametrize("period", [8, 16])
def test_something_repeated_in_every_patch_is_flagged(period):
    pattern = 6 * np.random.default_rng(0).standard_normal((period, period))
    tiled = np.tile(pattern, (288 // period, 384 // period))[..., None]
    found = patch_artefacts(photo("astronaut.png") + tiled, period)
    assert found.flagged and found.pattern > found.seams


@pytest.mark.parametrize("period", [8, 16])
def test_patches_of_shifted_brightness_are_flagged(period):
    levels = 12 * np.random.default_rng(0).standard_normal((288 // period, 384 // period))
    shifts = np.kron(levels, np.ones((period, period)))[..., None]
    found = patch_artefacts(photo("astronaut.png") + shifts, period)
    assert found.flagged and found.seams > found.pattern


def test_noise_and_constants_are_not_flagged():
    noise = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3))
    assert not patch_artefacts(noise, 8).flagged
    assert patch_artefacts(np.full((1, 64, 64, 3), 7), 8) == (0.0, 0.0)


def test_pictures_too_small_for_the_period():
    with pytest.raises(UserError, match="cannot be seen"):
        patch_artefacts(np.zeros((1, 16, 16, 3)), 8)
    assert artefact_scores(np.zeros((1, 16, 16, 3)), 8) == {}
    assert artefact_scores(np.zeros((1, 32, 32, 3)), 8)["artefact_flag"] is False
