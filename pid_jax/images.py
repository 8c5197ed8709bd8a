"""Picture files and pixel numbers: safe decoding, and the one rule between uint8 and [-1, 1]."""

import io
import warnings

import numpy as np
from PIL import Image

from pid_jax.errors import UserError

EXIF_ORIENTATION = 0x0112
# How the stored picture is turned for each orientation that EXIF knows; 1 is upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
# Formats that are only pixels; Pillow knows others that run programs (EPS) or hold documents (PDF).
_WANTED_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "AVIF")
# A JPEG with further pictures behind it, as cameras write them, is Pillow's MPO.
_JPEG = ("JPEG", "MPO")

# Pillow raises above twice its limit, which `decode` reports; its warning below that says nothing a
# user must act on.
MOST_PIXELS = 178_956_970
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def probe(data: bytes) -> tuple[int, int]:
    """(width, height) of an encoded picture as seen upright, from its header alone.

    Raises: UserError when the bytes are no picture of a known format.
    """
    with _open(data) as image:
        width, height = image.size
        return (height, width) if _orientation(image) in _SIDEWAYS else (width, height)


def format_of(data: bytes) -> str:
    """The format of an encoded picture by its content, such as "JPEG". Raises UserError."""
    with _open(data) as image:
        return "JPEG" if image.format in _JPEG else image.format


def decode(data: bytes, at_least: tuple[int, int] | None = None) -> Image.Image:
    """An encoded picture as upright 8-bit RGB.

    The first frame of animations; transparent parts stand on white; 16-bit grey keeps its high
    byte; CMYK, palette and grey are converted by Pillow; EXIF orientation is applied.

    Args:
      at_least: (width, height) as seen upright; a JPEG may then come out at a half, a quarter or an
        eighth of its size, as long as both sides are at least these: its decoder does so much less.
    Raises: UserError when the bytes are no complete picture, or have more than 178,956,970 pixels.
    """
    with _open(data) as image:
        orientation = _orientation(image)
        turn = _TURNS.get(orientation)
        try:
            if at_least is not None and image.format in _JPEG:
                image.draft(None, at_least[::-1] if orientation in _SIDEWAYS else at_least)
            image.load()
            rgb = _to_rgb(image)
        except (UserError, MemoryError):
            raise
        except Exception as error:  # Pillow's readers raise whatever a damaged file provokes.
            raise UserError(f"the picture is damaged: {error}") from error
    return rgb.transpose(turn) if turn is not None else rgb


def to_float(pixels: np.ndarray) -> np.ndarray:
    """uint8 -> float32 in [-1, 1]: (p / 255 - 0.5) / 0.5, as the reference normalises."""
    floats = pixels.astype(np.float32)
    floats /= np.float32(255)
    floats -= np.float32(0.5)
    floats /= np.float32(0.5)
    return floats


def crop_to_multiple(pixels: np.ndarray, multiple: int) -> np.ndarray:
    """The central part of [H, W, C] whose sides are the largest multiples that fit."""
    height, width = (side // multiple * multiple for side in pixels.shape[:2])
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top:top + height, left:left + width]


def to_uint8(images: np.ndarray, truncate: bool = False) -> np.ndarray:
    """float in [-1, 1] -> uint8: clipped, scaled to 0..255 and rounded (half to even).

    Args:
      truncate: cut off what is behind the point instead, as the reference does.
    Raises: UserError when a value is not finite.
    """
    images = np.asarray(images, np.float32)
    if not np.isfinite(images).all():
        raise UserError("the picture holds values that are not finite (nan or inf)")
    scaled = (np.clip(images, -1, 1) + 1) * 127.5
    return (scaled if truncate else np.rint(scaled)).astype(np.uint8)


def _open(data: bytes) -> Image.Image:
    if not data:
        raise UserError("the file is empty")
    try:
        return Image.open(io.BytesIO(data), formats=_formats())
    except Image.UnidentifiedImageError as error:
        raise UserError("not a picture of a known format") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"the picture is too large: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # As in `decode`.
        raise UserError(f"the picture's header is damaged: {error}") from error


def _formats() -> list[str]:
    Image.init()
    return [name for name in _WANTED_FORMATS if name in Image.OPEN]


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation; 1 where it is absent or its block is damaged (common, harmless), and
    for TIFF, which Pillow turns itself."""
    if image.format == "TIFF":
        return 1
    try:
        return image.getexif().get(EXIF_ORIENTATION, 1)
    except Exception:
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        high_byte = np.asarray(image).astype(np.uint16) >> 8
        return Image.fromarray(high_byte.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise UserError("the picture has 32-bit pixels; convert it to 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")  # convert copies in any case
