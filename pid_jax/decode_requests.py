"""From what the decode command is given to latents: reading, cropping, padding, encoding."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from pid_jax import images
from pid_jax.data import latent_files
from pid_jax.data.dataset import MANIFEST, Dataset
from pid_jax.data.ingest.folder import folder_items
from pid_jax.data.ingest.pack import Skip
from pid_jax.diffusion import degrade
from pid_jax.encoders.protocols import LatentCodec
from pid_jax.encoders.weights import MissingWeights
from pid_jax.errors import UserError
from pid_jax.inference import PixelDecoder
from pid_jax.sampling_inputs import check_sigma

Size = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Request:
    """One picture to draw.

    Attributes:
      name: relative path of its folder in the output, unique within a run of the command.
      source: what it comes from, for its JSON.
      latent: float32 [h, w, C], noised to `sigma`.
      sigma: noise level in [0, 1].
      prompt: caption.
      size: (height, width) wanted; what the latent covers beyond it, below and to the right, is
        padding.
      baseline: float32 [H, W, 3], what plain enlarging gives, or None when it is not known;
        `baseline_name` says of what.
      truth: float32 [H, W, 3], or None when it is not known.
    """

    name: str
    source: str
    latent: np.ndarray
    sigma: float
    prompt: str
    size: Size
    baseline: np.ndarray | None
    baseline_name: str
    truth: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Picture:
    """An input: its name, where it lies, float32 [H, W, 3] in [-1, 1], and its caption."""

    name: str
    source: str
    pixels: np.ndarray
    caption: str


def picture_requests(decoder: PixelDecoder, inputs: Sequence[Path], ground_truth: bool,
                     size: Size | None, sigmas: Sequence[float] | None, prompt: str | None,
                     seed: int, skipped: dict[str, str]) -> Iterator[Request]:
    """Requests for pictures, every noise level of one after another.

    Args:
      ground_truth: the inputs are large pictures: reduce them, and keep them as truth.
      size: (height, width) to draw, from the centre of the input; None: all of it.
      sigmas: noise levels; None: 0 alone.
      prompt: for all; None: the caption that the input has, or "".
      skipped: gets name -> reason of unreadable pictures in folders and data sets.
    Raises:
      UserError: a named file cannot be read, or a size that does not fit.
    """
    sigmas = check_sigma(sigmas or (0.0,))
    if size is not None:
        decoder.objective.check_picture(*size)
    unique = UniqueNames()
    for picture in read_pictures(inputs, skipped):
        name = unique(picture.name)
        small, truth = prepare(decoder, picture, ground_truth, size)
        height, width = (side * decoder.objective.net.sr_scale for side in small.shape[:2])
        baseline = np.asarray(degrade.upsample(small[None], height, width))[0]
        padded = pad(small, small_multiple(decoder))
        for sigma in sigmas:
            yield Request(name, picture.source,
                          np.asarray(decoder.encode(padded[None], sigma, seed))[0], sigma,
                          picture.caption if prompt is None else prompt, (height, width), baseline,
                          "lq_bicubic", truth)


def prepare(decoder: PixelDecoder, picture: Picture, ground_truth: bool, size: Size | None
            ) -> tuple[np.ndarray, np.ndarray | None]:
    """The small picture that is encoded, and the truth if it is known."""
    scale = decoder.objective.net.sr_scale
    if not ground_truth:
        if size is None:
            return picture.pixels, None
        return centre(picture, (size[0] // scale, size[1] // scale)), None
    step = scale * small_multiple(decoder)
    height, width = picture.pixels.shape[:2]
    truth = centre(picture, size or (height // step * step, width // step * step))
    if not truth.size:
        raise UserError(f"{picture.source} is {height} x {width} pixels; --ground_truth needs at "
                        f"least {step} x {step}")
    return np.asarray(degrade.downsample(truth[None], scale))[0], truth


def small_multiple(decoder: PixelDecoder) -> int:
    """Small pictures must be multiples of this: whole latent cells and whole patches."""
    net, codec = decoder.objective.net, decoder.objective.codec
    return int(np.lcm(net.patch_size, net.sr_scale * codec.spatial_factor)) // net.sr_scale


def centre(picture: Picture, size: Size) -> np.ndarray:
    """The central [height, width, 3] of a picture; UserError when it is smaller."""
    height, width = picture.pixels.shape[:2]
    if height < size[0] or width < size[1]:
        raise UserError(f"{picture.source} is {height} x {width} pixels (height x width), smaller "
                        f"than the {size[0]} x {size[1]} that are wanted; choose a smaller --size")
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    return picture.pixels[top:top + size[0], left:left + size[1]]


def pad(small: np.ndarray, multiple: int) -> np.ndarray:
    """Repeats the last row and column until both sides are multiples."""
    rows, columns = (-side % multiple for side in small.shape[:2])
    return np.pad(small, ((0, rows), (0, columns), (0, 0)), mode="edge")


def read_pictures(inputs: Sequence[Path], skipped: dict[str, str]) -> Iterator[Picture]:
    """Every picture of files, folders and packed data sets, in order."""
    for path in inputs:
        if (path / MANIFEST).is_file():
            yield from _read_dataset(path, skipped)
        elif path.is_dir():
            yield from _read_folder(path, skipped)
        else:
            yield _read_file(path)


def _read_file(path: Path) -> Picture:
    try:
        return Picture(path.stem, str(path), decode_pixels(path.read_bytes()), "")
    except OSError as error:
        raise UserError(f"the input {path} cannot be read: {error.strerror}") from error
    except UserError as error:
        raise UserError(f"the input {path} cannot be read: {error}") from error


def _read_folder(folder: Path, skipped: dict[str, str]) -> Iterator[Picture]:
    for item in folder_items(folder, missing="empty"):
        if isinstance(item, Skip):
            skipped[item.name] = item.reason
            continue
        try:
            pixels, caption = decode_pixels(item.read()), first(item.captions())
        except (OSError, UserError) as error:
            skipped[item.name] = str(error)
            continue
        yield Picture(item.key, str(folder / item.name), pixels, caption)


def _read_dataset(folder: Path, skipped: dict[str, str]) -> Iterator[Picture]:
    dataset = Dataset(folder)
    for number in range(len(dataset)):
        try:
            record = dataset[number]
            pixels = decode_pixels(record.image)
        except UserError as error:
            skipped[str(dataset.index.key[number])] = str(error)
            continue
        yield Picture(record.key, f"{folder}:{record.key}", pixels, first(record.captions))


def decode_pixels(data: bytes) -> np.ndarray:
    """A picture file's bytes as float32 [H, W, 3] in [-1, 1]."""
    return images.to_float(np.asarray(images.decode(data)))


def first(captions: Mapping[str, str]) -> str:
    """The first caption, or "" when there is none."""
    return next(iter(captions.values()), "")


def latent_requests(decoder: PixelDecoder, paths: Sequence[Path], layout: str,
                    sigmas: Sequence[float] | None, prompt: str | None) -> Iterator[Request]:
    """Requests for latent files; the given noise levels and prompt go before those in the files.

    The noise levels say what the latents already hold: none is added here.
    """
    codec, unique = decoder.objective.codec, UniqueNames()
    for path in paths:
        file = latent_files.read(path, codec.channels, codec.family, layout)
        size = decoder.output_size(file.latents.shape)
        decoder.objective.check_picture(*size)
        for number, latent in enumerate(decoder.check_latents(file.latents)):
            baseline = codec_picture(codec, latent, size)
            name = unique(path.stem if len(file.latents) == 1 else f"{path.stem}_{number:03d}")
            caption = file.prompts[number] if file.prompts else ""
            own = (0.0,) if file.sigma is None else (file.sigma[number],)
            for sigma in check_sigma(sigmas or own):
                yield Request(name, f"{path}[{number}]", latent, sigma,
                              caption if prompt is None else prompt, size, baseline,
                              "codec_bicubic")


def codec_picture(codec: LatentCodec, latent: np.ndarray, size: Size) -> np.ndarray | None:
    """What the codec's own decoder makes of a latent, enlarged; None where its weights are not
    there, which drawing does not need."""
    try:
        small = codec.decode(latent[None])
    except MissingWeights:
        return None
    return np.asarray(degrade.upsample(jnp.clip(small, -1, 1), *size))[0]


class UniqueNames:
    """Turns names into safe relative paths, each given once."""

    def __init__(self):
        self._given: set[str] = set()

    def __call__(self, name: str) -> str:
        wanted = unique = safe_path(name)
        for count in itertools.count(2):
            if unique not in self._given:
                break
            unique = f"{wanted}_{count}"
        self._given.add(unique)
        return unique


def safe_path(name: str) -> str:
    """`name` as a relative path of plain characters that leaves no folder."""
    parts = [re.sub(r"[^\w.\- ]", "_", part) for part in name.split("/")]
    return "/".join(part for part in parts if part.strip(". ")) or "picture"
