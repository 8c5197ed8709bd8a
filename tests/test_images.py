import io
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from pid_jax import images
from pid_jax.errors import UserError
from tests.data.sets import encoded, picture


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_formats_keep_every_pixel(kind):
    data = encoded(picture(), kind)
    assert images.probe(data) == (40, 30)
    np.testing.assert_array_equal(images.decode(data), picture())


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_lossy_formats_decode(kind):
    decoded = np.asarray(images.decode(encoded(picture(), kind)), np.float32)
    assert np.abs(decoded - np.asarray(picture())).mean() < 8


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])  # Pillow turns the second itself
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation, kind):
    exif = Image.Exif()
    exif[images.EXIF_ORIENTATION] = orientation
    data = encoded(picture(), kind, exif=exif)
    size = (30, 40) if orientation > 4 else (40, 30)
    assert images.probe(data) == images.decode(data).size == size
    if orientation == 6:
        np.testing.assert_array_equal(images.decode(data), np.rot90(picture(), -1))


def test_a_jpeg_with_pictures_behind_it_is_a_jpeg():
    frames = [picture(400, 300, seed) for seed in range(2)]
    data = encoded(frames[0], "MPO", save_all=True, append_images=frames[1:])
    assert images.format_of(data) == "JPEG"
    np.testing.assert_array_equal(images.decode(data), images.decode(encoded(frames[0], "JPEG")))
    assert images.decode(data, (200, 150)).size == (200, 150)


def test_damaged_exif_is_ignored():
    data = encoded(picture(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert images.decode(data).size == (40, 30)


def test_cmyk_and_grey_become_rgb():
    for mode in ("CMYK", "L"):
        decoded = images.decode(encoded(picture().convert(mode), "JPEG", quality=95))
        assert decoded.mode == "RGB"
    flat = Image.new("CMYK", (8, 8), (0, 0, 0, 0))
    assert np.asarray(images.decode(encoded(flat, "JPEG"))).min() > 250


def test_transparency_stands_on_white():
    image = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert images.decode(encoded(image)).getpixel((0, 0)) == (255, 255, 255)
    palette = picture().convert("P")
    data = encoded(palette, transparency=palette.getpixel((0, 0)))
    assert images.decode(data).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bit_grey_keeps_its_high_byte():
    grey = Image.fromarray(np.array([[0, 255, 256, 65535]], np.uint16))
    assert np.asarray(images.decode(encoded(grey)))[0, :, 0].tolist() == [0, 0, 1, 255]


def test_animations_show_their_first_frame():
    frames = [picture(seed=s) for s in range(3)]
    data = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    np.testing.assert_array_equal(images.decode(data), frames[0])


def huge_png(width=30_000, height=30_000) -> bytes:
    data = bytearray(encoded(Image.new("1", (8, 8))))
    data[16:24] = width.to_bytes(4) + height.to_bytes(4)
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4)
    return bytes(data)


def cut(kind: str) -> bytes:
    data = encoded(picture(200, 150), kind)
    return data[:len(data) // 2]


@pytest.mark.parametrize("data, reason", [
    (b"", "empty"),
    (b"this is text", "not a picture"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
    (cut("PNG"), "damaged"),
    (cut("JPEG"), "damaged"),
    (cut("WEBP"), "damaged|not a picture"),
    (encoded(picture())[:20], "damaged|not a picture"),
    (huge_png(), "too large"),
    (encoded(Image.new("F", (4, 4)), "TIFF"), "32-bit"),
])
def test_what_cannot_be_decoded_says_why(data, reason):
    with pytest.raises(UserError, match=reason) as caught:
        images.decode(data)
    assert " at 0x" not in str(caught.value)


def test_large_pictures_below_the_limit_raise_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
        assert images.probe(huge_png(12_000, 9_000)) == (12_000, 9_000)


def test_pixels_and_floats():
    pixels = np.arange(256, dtype=np.uint8)
    floats = images.to_float(pixels)
    assert floats.dtype == np.float32 and floats[0] == -1 and floats[255] == 1
    np.testing.assert_array_equal(images.to_uint8(floats), pixels)
    np.testing.assert_array_equal(images.to_uint8([-9, 0.5 / 127.5 - 1, 9]), [0, 0, 255])


def test_non_finite_pictures_are_refused():
    with pytest.raises(UserError, match="finite"):
        images.to_uint8([0.0, np.nan])


def test_every_truncation_of_a_jpeg_is_an_error_or_a_picture():
    data = encoded(picture(), "JPEG")
    for length in range(0, len(data) - 2, 7):
        with pytest.raises(UserError):
            images.decode(data[:length])
    assert Image.open(io.BytesIO(data)).size == (40, 30)


def test_floats_are_the_references_rule_for_every_byte():
    pixels = np.arange(256, dtype=np.uint8)
    expected = [(np.float32(p) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
                for p in range(256)]
    assert images.to_float(pixels).tolist() == expected
    assert images.to_float(pixels).dtype == np.float32


@pytest.mark.parametrize("size, at_least, expected", [
    ((400, 300), (200, 150), (200, 150)), ((400, 300), (201, 150), (400, 300)),
    ((401, 300), (100, 75), (101, 75)), ((400, 300), (1, 1), (50, 38)),
    ((400, 300), (500, 400), (400, 300))])
def test_large_jpegs_may_be_decoded_smaller(size, at_least, expected):
    smooth = picture(50, 38).resize(size, Image.Resampling.BICUBIC)
    data = encoded(smooth, "JPEG", quality=95, subsampling=0)
    small = images.decode(data, at_least)
    assert small.size == expected
    whole = images.decode(data).resize(expected, Image.Resampling.LANCZOS)
    assert np.abs(np.asarray(small, int) - np.asarray(whole)).mean() < 4


def test_turned_jpegs_are_covered_as_seen_upright():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(picture(400, 200), "JPEG", exif=exif)
    assert images.decode(data, (100, 100)).size == (100, 200)
    assert images.decode(data, (101, 50)).size == (200, 400)
