"""Where a picture goes in its bucket: resize and crop, first as pure sizes, then on pixels.

The covering rule is the reference's (`ResizeScale` and `CenterCrop` of its data augmentation):
the smallest Lanczos picture that covers the target, then a crop. Sizes are (width, height) and
offsets (x, y), in pixels.
"""

import dataclasses
import math

from PIL import Image

from pid_jax import images
from pid_jax.errors import UserError

Size = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Placement:
    """One way to bring a picture to a target size.

    Attributes:
      native: size of the picture.
      resized: size after the resize; equal to `native` when the picture is not resampled.
      corner: upper left corner of the crop in the resized picture.
      target: size of the crop.
    """

    native: Size
    resized: Size
    corner: tuple[int, int]
    target: Size

    @property
    def resizes(self) -> bool:
        """Whether the picture is resampled at all."""
        return self.resized != self.native

    @property
    def enlarges(self) -> bool:
        """Whether the picture was smaller than its target."""
        return self.resized[0] > self.native[0] or self.resized[1] > self.native[1]

    def apply(self, image: Image.Image) -> Image.Image:
        """The crop of the resized `image`; its size is `native`, or between that and `resized`."""
        if image.size != self.resized:
            image = image.resize(self.resized, Image.Resampling.LANCZOS)
        x, y = self.corner
        return image.crop((x, y, x + self.target[0], y + self.target[1]))


def cover(native: Size, target: Size, min_scale: float = 1.0) -> Placement | None:
    """Reduces the whole picture as far as `target` stays covered, then takes the centre.

    Args:
      native, target: sizes.
      min_scale: a picture too small for the target is enlarged when its smaller ratio
        native / target exceeds this (the reference's single-resolution rescue: 0.9).
    Returns:
      The placement, or None for a picture that is too small.
    """
    scale = cover_scale(native, target)
    if scale < 1 and not scale > min_scale:
        return None
    return centred(native, covering_size(native, target, scale), target)


def cover_scale(native: Size, target: Size) -> float:
    """How many times the picture can be reduced until it just covers `target`."""
    return min(native[0] / target[0], native[1] / target[1])


def covering_size(native: Size, target: Size, scale: float) -> Size:
    """`native` divided by `scale`: rounded up when reducing, to nearest when enlarging."""
    if scale == 1:
        return native
    divide = (lambda n: math.ceil(n / scale)) if scale > 1 else (lambda n: int(n / scale + 0.5))
    return max(target[0], divide(native[0])), max(target[1], divide(native[1]))


def centred(native: Size, resized: Size, target: Size) -> Placement:
    """The centre crop, half pixels rounded to even as torchvision does."""
    x, y = (round((r - t) / 2) for r, t in zip(resized, target))
    return Placement(native, resized, (x, y), target)


def adm_crop(image: Image.Image, side: int) -> Image.Image:
    """The square of ADM, JiT and TiTok: halve by boxes, then bicubic to the side, then the centre.

    Source: `center_crop_arr` of guided-diffusion (arXiv 2105.05233). Smaller pictures are enlarged.
    Raises: UserError for a picture so long and thin that it would be enlarged beyond what
      `images.decode` reads.
    """
    while min(image.size) >= 2 * side:
        image = image.resize(tuple(length // 2 for length in image.size), Image.Resampling.BOX)
    scale = side / min(image.size)
    size = tuple(round(length * scale) for length in image.size)
    if size[0] * size[1] > images.MOST_PIXELS:
        raise UserError(f"the picture is too long and thin for a square of {side} pixels: all of it "
                        f"would be {size[0]} x {size[1]}")
    image = image.resize(size, Image.Resampling.BICUBIC)
    x, y = ((length - side) // 2 for length in image.size)
    return image.crop((x, y, x + side, y + side))


def at_fraction(native: Size, resized: Size, target: Size, fraction: tuple[float, float]
                ) -> Placement:
    """A crop whose corner is `fraction` (x, y in [0, 1)) of the way; each position equally likely
    for uniform fractions."""
    x, y = (int(f * (r - t + 1)) for f, r, t in zip(fraction, resized, target))
    return Placement(native, resized, (x, y), target)


def between(native: Size, target: Size, fraction: float) -> Size:
    """A size between the covering one (fraction 0) and the native one (1), even in log scale."""
    scale = cover_scale(native, target)
    return covering_size(native, target, scale ** (1 - fraction) if scale > 1 else scale)
