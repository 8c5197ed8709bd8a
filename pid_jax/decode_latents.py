"""From latent files that the decode command is given to requests."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pid_jax.data import command, latent_files, latent_layouts, manifests
from pid_jax.decode_requests import (Request, Size, UniqueNames, Wishes, check_levels,
                                     digest)
from pid_jax.encoders.pipeline_latents import TOKEN_PIXELS, reframe
from pid_jax.encoders.protocols import LatentCodec
from pid_jax.encoders.weights import MissingWeights
from pid_jax.errors import UserError
from pid_jax.inference import PixelDecoder
from tools.convert_torch_weights.fix_batch import read_fix_batch

USUAL_SPREAD = (0.2, 4.0)  # standard deviations of latents that need no word


def latent_requests(decoder: PixelDecoder, paths: Sequence[Path], wishes: Wishes
                    ) -> Iterator[Request]:
    """Requests for latent files; the given noise levels and prompt go before those in the files.

    The noise levels say what the latents already hold, as the sampler of their frame counts it:
    none is added here.
    """
    unique = UniqueNames()
    for entry in _entries(paths):
        file = read_latents(decoder, entry.path, wishes)
        latents = decoder.check_latents(file.latents)
        whole = decoder.output_size(latents.shape)
        decoder.objective.check_picture(*whole)
        size = whole if wishes.size is None else decoder.check_cut(wishes.size, whole)
        _check_spread(latents, entry.path)
        frame = wishes.frame or entry.frame or file.frame or decoder.path
        for number in range(len(latents)):
            name = unique(entry.name if len(latents) == 1 else f"{entry.name}_{number:03d}")
            item = _Item(file, number, entry)
            framed = [reframe(latents[number], level, frame, decoder.path)
                      for level in wishes.sigmas or item.sigmas]
            check_levels([sigma for _, sigma in framed], str(entry.path))
            scale = decoder.objective.net.sr_scale
            small = _covering(item.picture(file.small), tuple(-(-side // scale) for side in size))
            for latent, sigma in framed:
                yield Request(
                    name, f"{entry.path}[{number}]", sigma,
                    item.prompt if wishes.prompt is None else wishes.prompt,
                    wishes.seed if entry.seed is None else entry.seed, size, latents.shape[1:3],
                    digest(latent, *item.given.values()), functools.partial(np.asarray, latent),
                    small, _cut(item.picture(file.truth), size), item.given)


@dataclasses.dataclass(frozen=True)
class _Item:
    """One latent of a file, and what file and manifest say of it."""

    file: latent_files.Latents
    number: int
    entry: manifests.Entry

    @property
    def sigmas(self) -> tuple[float, ...]:
        own = (0.0,) if self.file.sigma is None else (self.file.sigma[self.number],)
        return self.entry.sigmas or own

    @property
    def prompt(self) -> str:
        if self.entry.prompt is not None:
            return self.entry.prompt
        return self.file.prompts[self.number] if self.file.prompts else ""

    @property
    def given(self) -> dict[str, np.ndarray]:
        """Explicit arrays of this latent alone."""
        found: dict[str, Any] = {"embeddings": self.file.embeddings, "noise": self.file.noise,
                                 "step_noise": self.file.step_noise}
        rows = slice(self.number, self.number + 1)
        try:
            return {name: np.asarray(array)[:, rows] if name == "step_noise" else array[rows]
                    for name, array in found.items() if array is not None}
        except IndexError as error:
            raise UserError(f"{self.entry.path}: noise and step_noise need an axis for the latents "
                            f"of the batch: {error}") from error

    def picture(self, pictures: np.ndarray | None) -> np.ndarray | None:
        return None if pictures is None else pictures[min(self.number, len(pictures) - 1)]


def _cut(picture: np.ndarray | None, size: Size) -> np.ndarray | None:
    """A truth [H, W, 3] of the drawn size; None where it is smaller."""
    picture = _covering(picture, size)
    return None if picture is None else picture[:size[0], :size[1]]


def _covering(picture: np.ndarray | None, size: Size) -> np.ndarray | None:
    """The picture; None where it is smaller than `size`."""
    if picture is None or picture.shape[0] < size[0] or picture.shape[1] < size[1]:
        return None
    return picture


def _entries(paths: Sequence[Path]) -> Iterator[manifests.Entry]:
    for path in paths:
        if path.suffix == manifests.ENDING:
            yield from manifests.read(path, "latent")
        else:
            yield manifests.Entry(path, path.stem)


def read_latents(decoder: PixelDecoder, path: Path, wishes: Wishes) -> latent_files.Latents:
    """A latent file of any kind, the reference's fix batches (.pt) included."""
    codec, scale = decoder.objective.codec, decoder.objective.net.sr_scale
    if path.suffix == ".pt":
        if not path.is_file():
            raise UserError(f"there is no latent file {path}")
        batch = read_fix_batch(path)
        latents = latent_layouts.bring(batch.latents, codec.channels, codec.family,
                                       "channels_last", path)
        return latent_files.Latents(latents, batch.sigma.tolist(), list(batch.captions),
                                    small=batch.small, truth=batch.large)
    picture = None
    if wishes.size is not None:
        picture = tuple(-(-side // (scale * TOKEN_PIXELS)) * TOKEN_PIXELS for side in wishes.size)
    return latent_files.read(path, codec.channels, codec.family, wishes.layout, picture,
                             functools.partial(_statistics, codec))


def _statistics(codec: LatentCodec) -> tuple[np.ndarray, np.ndarray]:
    """Running mean and variance of the codec's BatchNorm, by which raw latents are normalised."""
    try:
        return tuple(np.asarray(codec.params["bn"][name], np.float32) for name in ("mean", "var"))
    except MissingWeights as error:
        raise UserError(f"raw latents are normalised by the codec's weights: {error}") from error


def _check_spread(latents: np.ndarray, path: Path) -> None:
    """A word about latents that are hardly normalised."""
    spread = float(np.std(latents))
    if not USUAL_SPREAD[0] <= spread <= USUAL_SPREAD[1]:
        command.warn(f"the latents in {path} have a standard deviation of {spread:.3g}; normalised "
                     "as the network reads them it is about 1: check scale and shift")
