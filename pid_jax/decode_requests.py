"""From pictures that the decode command is given to requests: reading, cropping, padding."""

import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from pid_jax import images
from pid_jax.data import manifests
from pid_jax.data.dataset import MANIFEST, Dataset
from pid_jax.data.ingest.folder import folder_items
from pid_jax.data.ingest.pack import Skip
from pid_jax.diffusion import degrade
from pid_jax.encoders.protocols import LatentCodec
from pid_jax.encoders.weights import MissingWeights
from pid_jax.errors import UserError
from pid_jax.inference import PixelDecoder
from pid_jax.sampling_inputs import check_sigma

CODEC, LQ = "codec_bicubic", "lq_bicubic"
Size = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What the command line asks of every input; None: as the input says.

    Attributes:
      size: (height, width) to draw.
      sigmas: noise levels, each drawn.
      prompt, seed: of all inputs.
      frame: scale of noised latents, see `pipeline_latents.reframe`.
      layout: of latents, see `latent_layouts`.
      ground_truth: pictures are large: reduce them, and keep them as truth.
    """

    size: Size | None = None
    sigmas: tuple[float, ...] | None = None
    prompt: str | None = None
    seed: int = 0
    frame: str | None = None
    layout: str = "auto"
    ground_truth: bool = False


@dataclasses.dataclass(frozen=True)
class Request:
    """One picture to draw. What is costly to make is made when it is first asked for.

    Attributes:
      name: relative path of its folder in the output, unique within a run of the command.
      source: what it comes from, for its JSON.
      sigma: noise level in [0, 1].
      prompt: caption; seed: of the noise.
      size: (height, width) wanted; what the latent covers beyond it, below and to the right, is
        padding.
      grid: (rows, columns) of the latent.
      content: digest of what determines the latent.
      make_latent: gives it, float32 [h, w, C], noised to `sigma`.
      small: float32 [h, w, 3], the picture that was encoded, or None when it is not known.
      truth: float32 [H, W, 3], or None when it is not known.
      given: explicit `embeddings`, `noise` and `step_noise`, where the input has them.
    """

    name: str
    source: str
    sigma: float
    prompt: str
    seed: int
    size: Size
    grid: Size
    content: str
    make_latent: Callable[[], np.ndarray]
    small: np.ndarray | None = None
    truth: np.ndarray | None = None
    given: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def latent(self) -> np.ndarray:
        """float32 [h, w, C], noised to `sigma`."""
        return self.make_latent()

    def baselines(self, decoder: PixelDecoder, codec: bool) -> dict[str, np.ndarray]:
        """What plain enlarging gives, float32 [H, W, 3] by name.

        Args:
          codec: also what the codec's own decoder makes of the latent, which stands alone where
            the small picture is not known (there its weights may be missing).
        """
        found, (height, width) = {}, decoder.output_size((*self.grid, 0))
        if codec or self.small is None:
            enlarged = codec_picture(decoder.objective.codec, self.latent, (height, width))
            if enlarged is None and codec:
                raise UserError("--codec needs the weights of the codec's decoder, which are not "
                                "there; leave it out")
            found |= {CODEC: enlarged} if enlarged is not None else {}
        if self.small is not None:
            scale = decoder.objective.net.sr_scale
            sides = tuple(side * scale for side in self.small.shape[:2])
            found[LQ] = np.asarray(degrade.upsample(self.small[None], *sides))[0]
        return {name: picture[:self.size[0], :self.size[1]] for name, picture in found.items()}


@dataclasses.dataclass(frozen=True)
class Picture:
    """An input: its name, where it lies, float32 [H, W, 3] in [-1, 1], and its caption; from a
    manifest also noise levels and seed."""

    name: str
    source: str
    pixels: np.ndarray
    caption: str
    sigmas: tuple[float, ...] | None = None
    seed: int | None = None


def picture_requests(decoder: PixelDecoder, inputs: Sequence[Path], wishes: Wishes,
                     skipped: dict[str, str]) -> Iterator[Request]:
    """Requests for pictures, every noise level of one after another.

    Args:
      skipped: gets name -> reason of unreadable pictures in folders and data sets.
    Raises:
      UserError: a named file cannot be read, or a size that does not fit.
    """
    unique = UniqueNames()
    for picture in read_pictures(inputs, skipped):
        sigmas = check_sigma(wishes.sigmas or picture.sigmas or (0.0,))
        check_levels(sigmas, picture.source)
        seed = wishes.seed if picture.seed is None else picture.seed
        name = unique(picture.name)
        small, size, truth = prepare(decoder, picture, wishes.ground_truth, wishes.size)
        padded = pad(small, small_multiple(decoder))
        factor = decoder.objective.codec.spatial_factor
        grid = padded.shape[0] // factor, padded.shape[1] // factor
        decoder.objective.check_picture(*decoder.output_size((*grid, 0)))
        for sigma in sigmas:
            yield Request(
                name, picture.source, sigma,
                picture.caption if wishes.prompt is None else wishes.prompt, seed, size, grid,
                digest(padded), functools.partial(_encoded, decoder, padded, sigma, seed),
                small, truth)


def _encoded(decoder: PixelDecoder, padded: np.ndarray, sigma: float, seed: int) -> np.ndarray:
    return np.asarray(decoder.encode(padded[None], sigma, seed))[0]


def level_name(sigma: float) -> str:
    """What files of a noise level are called."""
    return f"sigma_{sigma:.3f}"


def check_levels(sigmas: Sequence[float], source: str) -> None:
    """Refuses noise levels of one input that would have one file name."""
    if len({level_name(sigma) for sigma in sigmas}) < len(sigmas):
        raise UserError(f"{source}: noise levels {', '.join(f'{s:g}' for s in sigmas)} differ by "
                        "less than 0.001, which have one file name; leave one out")


def digest(*arrays: np.ndarray) -> str:
    """A text that differs when any number does."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def prepare(decoder: PixelDecoder, picture: Picture, ground_truth: bool, size: Size | None
            ) -> tuple[np.ndarray, Size, np.ndarray | None]:
    """The small picture that is encoded, the size to draw, and the truth if it is known.

    Sides that do not fit are padded with the last row and column, and the padding is cut off the
    drawn picture.
    """
    scale = decoder.objective.net.sr_scale
    if ground_truth:
        truth = picture.pixels if size is None else centre(picture, size)
        padded = pad(truth, scale * small_multiple(decoder))
        return np.asarray(degrade.downsample(padded[None], scale))[0], truth.shape[:2], truth
    if size is None:
        height, width = picture.pixels.shape[:2]
        return picture.pixels, (height * scale, width * scale), None
    return centre(picture, tuple(-(-side // scale) for side in size)), size, None


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
    """Every picture of files, folders, manifests (.jsonl) and packed data sets, in order."""
    for path in inputs:
        if (path / MANIFEST).is_file():
            yield from _read_dataset(path, skipped)
        elif path.is_dir():
            yield from _read_folder(path, skipped)
        elif path.suffix == manifests.ENDING:
            yield from _read_manifest(path)
        else:
            yield _read_file(path)


def _read_manifest(path: Path) -> Iterator[Picture]:
    for entry in manifests.read(path, "image"):
        yield dataclasses.replace(_read_file(entry.path), name=entry.name, sigmas=entry.sigmas,
                                  caption=entry.prompt or "", seed=entry.seed)


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


def codec_picture(codec: LatentCodec, latent: np.ndarray, size: Size) -> np.ndarray | None:
    """What the codec's own decoder makes of a latent, enlarged; None where its weights are not
    there, which drawing does not need."""
    try:
        small = codec.decode(latent[None])
    except MissingWeights:
        return None
    return np.asarray(degrade.upsample(jnp.clip(small, -1, 1), *size))[0]


# What `decode` writes beside the pictures.
OWN_FILES = re.compile(r"compare\.html|metrics\.json|grid(_\d+x\d+)?\.png", re.IGNORECASE)


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
    """`name` as a relative path of plain characters that leaves no folder, and takes the place of
    no file that the command writes there."""
    parts = [re.sub(r"[^\w.\- ]", "_", part) for part in name.split("/")]
    path = "/".join(part for part in parts if part.strip(". ")) or "picture"
    return f"picture_{path}" if OWN_FILES.fullmatch(path.split("/")[0]) else path
