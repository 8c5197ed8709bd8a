import numpy as np
import pytest
from skimage import color, data, metrics

from pid_jax.errors import UserError
from pid_jax.evaluation import image_metrics

PHOTO = data.astronaut()[100:180, 150:214]


def worse(seed=0):
    noise = np.random.default_rng(seed).normal(0, 12, PHOTO.shape)
    return np.clip(PHOTO + noise, 0, 255).astype(np.uint8)


def test_psnr_equals_scikit_image():
    np.testing.assert_allclose(image_metrics.psnr(worse(), PHOTO),
                               metrics.peak_signal_noise_ratio(PHOTO, worse()), rtol=1e-12)
    assert np.isinf(image_metrics.psnr(PHOTO, PHOTO))


def test_ssim_equals_scikit_image():
    """scikit-image reflects at the border where we have zeros: on a black frame both agree."""
    a, b = (np.pad(picture, [(12, 12), (12, 12), (0, 0)]) for picture in (PHOTO, worse()))
    _, expected = metrics.structural_similarity(
        a, b, channel_axis=-1, data_range=255, sigma=1.5, gaussian_weights=True,
        use_sample_covariance=False, full=True)
    np.testing.assert_allclose(image_metrics.ssim(b, a), expected.mean(), atol=1e-6)
    np.testing.assert_allclose(image_metrics.ssim(PHOTO, PHOTO), 1.0)


def test_batches_give_one_number_per_picture():
    batch, references = np.stack([worse(0), worse(1)]), np.stack([PHOTO, PHOTO])
    for metric in (image_metrics.psnr, image_metrics.ssim, image_metrics.lq_color_de2000):
        values = metric(batch, references)
        assert values.shape == (2,)
        np.testing.assert_allclose(values[1], metric(batch[1], PHOTO))


def test_ciede2000_equals_scikit_image():
    ours = image_metrics.srgb_to_lab(PHOTO), image_metrics.srgb_to_lab(worse())
    theirs = color.rgb2lab(PHOTO), color.rgb2lab(worse())
    np.testing.assert_allclose(ours[0], theirs[0], atol=2e-3)
    np.testing.assert_allclose(image_metrics.ciede2000(*theirs),
                               color.deltaE_ciede2000(*theirs), atol=1e-10)


def test_ciede2000_published_pairs():
    """Rows 1, 7, 17 and 25 of the test data of Sharma et al. 2005."""
    first = np.array([[50, 2.6772, -79.7751], [50, 0, 0], [50, 2.5, 0],
                      [60.2574, -34.0099, 36.2677]])
    second = np.array([[50, 0, -82.7485], [50, -1, 2], [73, 25, -18],
                       [60.4626, -34.1751, 39.4387]])
    np.testing.assert_allclose(image_metrics.ciede2000(first, second),
                               [2.0425, 2.3669, 27.1492, 1.2644], atol=1e-4)


@pytest.mark.parametrize("size", [(20, 16), (27, 21), (160, 128)])
def test_pictures_are_brought_to_the_size_of_the_input(size):
    grey = np.full((*size, 3), 120, np.uint8)
    assert image_metrics.lq_color_de2000(np.full_like(PHOTO, 120), grey) < 1e-6


def test_shapes_must_agree():
    with pytest.raises(UserError, match="differ in shape"):
        image_metrics.psnr(PHOTO, PHOTO[:10])
