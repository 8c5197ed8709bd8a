"""Image metrics with a reference picture, in float64 on the host.

Pictures are uint8 or float in 0..255, [H, W, 3] or batches [B, H, W, 3], RGB; every metric
returns one number per picture (a scalar for a single one).
"""

import numpy as np

from pid_jax.diffusion import resampling
from pid_jax.errors import UserError

EQUAL_DB = 100.0


def psnr(pictures: np.ndarray, references: np.ndarray, data_range: float = 255.0) -> np.ndarray:
    """Peak signal-to-noise ratio in dB; infinite for equal pictures."""
    pictures, references = _pair(pictures, references)
    error = np.mean(np.square(pictures - references), axis=(-3, -2, -1))
    with np.errstate(divide="ignore"):
        return 10.0 * np.log10(data_range**2 / error)


def finite_psnr(pictures: np.ndarray, references: np.ndarray) -> np.ndarray:
    """`psnr` of bytes with 100 dB for equal pictures, so that a blank one spoils no mean."""
    return np.minimum(psnr(pictures, references), EQUAL_DB)


def ssim(pictures: np.ndarray, references: np.ndarray, data_range: float = 255.0) -> np.ndarray:
    """Structural similarity (Wang et al. 2004), mean over pixels and channels.

    Gaussian window 11 x 11 with sigma 1.5, "same" size with zeros outside the picture,
    K1 = 0.01, K2 = 0.03, statistics without Bessel's correction.
    """
    x, y = (a / data_range for a in _pair(pictures, references))
    mean_x, mean_y = _blur(x), _blur(y)
    variance_x, variance_y = _blur(x * x) - mean_x**2, _blur(y * y) - mean_y**2
    covariance = _blur(x * y) - mean_x * mean_y
    luminance = (2.0 * mean_x * mean_y + 0.01**2) / (mean_x**2 + mean_y**2 + 0.01**2)
    structure = (2.0 * covariance + 0.03**2) / (variance_x + variance_y + 0.03**2)
    return np.mean(luminance * structure, axis=(-3, -2, -1))


def lq_color_de2000(pictures: np.ndarray, lq: np.ndarray) -> np.ndarray:
    """Mean CIEDE2000 colour difference between pictures and their low-quality inputs.

    Pictures of another size are first brought to the size of `lq`: by area where that shrinks an
    axis, bicubic where it enlarges both. 1 is about a just noticeable difference.
    """
    resized = _resize_to(np.asarray(pictures, np.float64), np.shape(lq)[-3:-1])
    return np.mean(ciede2000(srgb_to_lab(resized), srgb_to_lab(lq)), axis=(-2, -1))


def srgb_to_lab(pictures: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65, 2 degrees) of sRGB pictures in 0..255; float64, same shape."""
    srgb = np.asarray(pictures, np.float64) / 255.0
    linear = np.where(srgb > 0.04045, ((np.maximum(srgb, 0.0) + 0.055) / 1.055) ** 2.4,
                      srgb / 12.92)
    xyz = linear @ _RGB_TO_XYZ.T / _WHITE_D65
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16.0 / 116.0)
    x, y, z = np.moveaxis(f, -1, 0)
    return np.stack([116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)], axis=-1)


def ciede2000(lab1: np.ndarray, lab2: np.ndarray) -> np.ndarray:
    """CIEDE2000 difference of L*a*b* colours [..., 3] with kL = kC = kH = 1.

    Source: Sharma, Wu and Dalal, Color Research and Application 30(1), 2005.
    """
    (l1, c1, h1), (l2, c2, h2) = _lightness_chroma_hue(lab1, lab2)
    hue_step = _hue_step(h1, h2, c1 * c2)
    mean_l, mean_c, mean_h = (l1 + l2) / 2.0, (c1 + c2) / 2.0, _mean_hue(h1, h2, c1 * c2)
    weight_l = 1.0 + 0.015 * (mean_l - 50.0) ** 2 / np.sqrt(20.0 + (mean_l - 50.0) ** 2)
    weight_c = 1.0 + 0.045 * mean_c
    weight_h = 1.0 + 0.015 * mean_c * _hue_factor(mean_h)
    dl = (l2 - l1) / weight_l
    dc = (c2 - c1) / weight_c
    dh = 2.0 * np.sqrt(c1 * c2) * np.sin(hue_step / 2.0) / weight_h
    return np.sqrt(np.maximum(dl**2 + dc**2 + dh**2 + _rotation(mean_c, mean_h) * dc * dh, 0.0))


_RGB_TO_XYZ = np.array([[0.412453, 0.357580, 0.180423],
                        [0.212671, 0.715160, 0.072169],
                        [0.019334, 0.119193, 0.950227]])
_WHITE_D65 = np.array([0.95047, 1.0, 1.08883])


def _lightness_chroma_hue(lab1: np.ndarray, lab2: np.ndarray) -> list[tuple]:
    """(L, C', h' in 0..2 pi) of both, with a* stretched where the mean chroma is low."""
    mean_c = (np.hypot(lab1[..., 1], lab1[..., 2]) + np.hypot(lab2[..., 1], lab2[..., 2])) / 2.0
    stretch = 1.5 - 0.5 * np.sqrt(mean_c**7 / (mean_c**7 + 25.0**7))
    polar = []
    for lab in (lab1, lab2):
        a, b = lab[..., 1] * stretch, lab[..., 2]
        polar.append((lab[..., 0], np.hypot(a, b), np.arctan2(b, a) % (2.0 * np.pi)))
    return polar


def _hue_step(h1: np.ndarray, h2: np.ndarray, chroma_product: np.ndarray) -> np.ndarray:
    """h2 - h1 the short way round; 0 where either colour is grey."""
    step = h2 - h1
    step = np.where(step > np.pi, step - 2.0 * np.pi, step)
    step = np.where(step < -np.pi, step + 2.0 * np.pi, step)
    return np.where(chroma_product == 0.0, 0.0, step)


def _mean_hue(h1: np.ndarray, h2: np.ndarray, chroma_product: np.ndarray) -> np.ndarray:
    total, apart = h1 + h2, np.abs(h1 - h2) > np.pi
    total = np.where(apart, total + np.where(total < 2.0 * np.pi, 2.0, -2.0) * np.pi, total)
    return np.where(chroma_product == 0.0, h1 + h2, total / 2.0)


def _hue_factor(hue: np.ndarray) -> np.ndarray:
    return (1.0 - 0.17 * np.cos(hue - np.deg2rad(30.0)) + 0.24 * np.cos(2.0 * hue)
            + 0.32 * np.cos(3.0 * hue + np.deg2rad(6.0))
            - 0.20 * np.cos(4.0 * hue - np.deg2rad(63.0)))


def _rotation(chroma: np.ndarray, hue: np.ndarray) -> np.ndarray:
    """The blue-region term that couples chroma and hue."""
    angle = np.deg2rad(60.0) * np.exp(-(((np.rad2deg(hue) - 275.0) / 25.0) ** 2))
    return -2.0 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7)) * np.sin(angle)


def _pair(pictures: np.ndarray, references: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if np.shape(pictures) != np.shape(references):
        raise UserError(f"pictures {np.shape(pictures)} and references {np.shape(references)} "
                        "differ in shape; resize one of them first")
    return np.asarray(pictures, np.float64), np.asarray(references, np.float64)


def _blur(pictures: np.ndarray) -> np.ndarray:
    """Separable Gaussian filter of both picture axes, zeros outside."""
    offsets = np.arange(-5, 6)
    window = np.exp(-(offsets**2) / (2.0 * 1.5**2))
    window /= window.sum()
    for axis in (-3, -2):
        pad = [(0, 0)] * pictures.ndim
        pad[axis] = (5, 5)
        padded, size = np.pad(pictures, pad), pictures.shape[axis]
        pictures = sum(weight * np.take(padded, range(k, k + size), axis)
                       for k, weight in enumerate(window))
    return pictures


def _resize_to(pictures: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    height, width = pictures.shape[-3:-1]
    if (height, width) == tuple(size):
        return pictures
    shrinks = size[0] < height or size[1] < width
    matrix = resampling.coverage_matrix if shrinks else resampling.bicubic_matrix
    rows, columns = matrix(height, size[0]), matrix(width, size[1])
    return np.einsum("ph,...hwc,qw->...pqc", rows, pictures, columns, optimize=True)
