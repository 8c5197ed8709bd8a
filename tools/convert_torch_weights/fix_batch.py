"""Latents that the reference saved as `fix_batch_*.pt`, read without PyTorch."""

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from pid_jax import images
from pid_jax.errors import UserError
from pid_jax.files import atomic_write
from tools.convert_torch_weights.readers import LazyTensor, Unreadable
from tools.convert_torch_weights.readers.torch_file import read_everything

HELP = "latents that the reference saved, to .npz"
PLACEHOLDER = 127  # a picture of this value alone stands for "no picture"


@dataclasses.dataclass(frozen=True)
class FixBatch:
    """What a file holds.

    Attributes:
      latents: float32 [B, h, w, C].
      sigma: float32 [B], noise levels.
      captions: B texts.
      small: float32 [B, H, W, 3] in [-1, 1], the picture that was encoded.
      large: the same of the original, or None where a placeholder stands in its place.
    """

    latents: np.ndarray
    sigma: np.ndarray
    captions: tuple[str, ...]
    small: np.ndarray
    large: np.ndarray | None


def read_fix_batch(path: str | Path) -> FixBatch:
    """Reads one file: PNG pictures with a bfloat16 latent, or the older form with raw tensors.

    Raises:
      UserError: not such a file, damaged, or asking to run something.
    """
    path = Path(path)
    held = read_everything(path)
    latent = _need(path, held, "LQ_latent", LazyTensor).read().astype(np.float32)
    if latent.ndim < 3 or not latent.size:
        raise Unreadable(path, f"its latent has the shape {latent.shape}", "LQ_latent")
    latents = np.moveaxis(latent.reshape(-1, *latent.shape[-3:]), 1, -1)
    small = _picture(path, held, "LQ_video_or_image")
    return FixBatch(latents, _sigma(path, held, len(latents)), _captions(held, len(latents)), small,
                    _original(path, held))


def convert_fix_batch(src: str | Path, dst: str | Path) -> FixBatch:
    """Writes latents, noise levels, captions and pictures as .npz, which `pid_jax.decode --latents`
    and `config.sample.batches` read."""
    batch = read_fix_batch(src)
    if Path(dst).suffix != ".npz":
        raise UserError(f"{dst} should end in .npz")
    with atomic_write(dst, "wb") as file:
        np.savez(file, latent=batch.latents, sigma=batch.sigma, prompt=np.array(batch.captions),
                 **_pictures(batch))
    return batch


def _pictures(batch: FixBatch) -> dict[str, np.ndarray]:
    """`lq` and `truth` as uint8, where there is one for every latent."""
    held = {"lq": batch.small, "truth": batch.large}
    return {name: images.to_uint8(pictures) for name, pictures in held.items()
            if pictures is not None and len(pictures) == len(batch.latents)}


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the sub-command `fix-batch`."""
    parser.set_defaults(run=_run)
    parser.add_argument("--src", required=True, type=Path, help="fix_batch_*.pt")
    parser.add_argument("--dst", required=True, type=Path, help=".npz file to make")


def _run(arguments: argparse.Namespace) -> None:
    batch = convert_fix_batch(arguments.src, arguments.dst)
    print(f"{arguments.dst}: latents {list(batch.latents.shape)}, noise level "
          f"{', '.join(f'{sigma:g}' for sigma in batch.sigma)}, {' | '.join(batch.captions)}")


def _need(path: Path, held: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(held.get(key), kind):
        raise Unreadable(path, "it is no fix batch: this entry is missing or of another type", key)
    return held[key]


def _sigma(path: Path, held: dict[str, Any], count: int) -> np.ndarray:
    sigma = held.get("degrade_sigma", 0.0)
    sigma = sigma.read() if isinstance(sigma, LazyTensor) else sigma
    try:
        return np.broadcast_to(np.asarray(sigma, np.float32).reshape(-1), (count,))
    except (ValueError, TypeError, OverflowError) as error:
        raise Unreadable(path, f"it holds no noise level for each of {count} latents",
                         "degrade_sigma") from error


def _captions(held: dict[str, Any], count: int) -> tuple[str, ...]:
    """One text, or a list of them."""
    texts = [value for key, value in held.items() if re.fullmatch(r"caption(\.\d+)?", key)]
    return tuple(map(str, texts)) if len(texts) == count else (str((texts or [""])[0]),) * count


def _picture(path: Path, held: dict[str, Any], key: str) -> np.ndarray:
    """PNG bytes, or a tensor [B, 3, H, W] of uint8 or of float in [-1, 1]."""
    value = held.get(key)
    if isinstance(value, bytes):
        return images.to_float(np.asarray(images.decode(value)))[None]
    pixels = _need(path, held, key, LazyTensor).read()
    if pixels.ndim < 3 or pixels.shape[-3] != 3 or not pixels.size:
        raise Unreadable(path, f"a picture [B, 3, H, W] has the shape {pixels.shape}", key)
    pixels = np.moveaxis(pixels.reshape(-1, *pixels.shape[-3:]), 1, -1)
    return images.to_float(pixels) if pixels.dtype == np.uint8 else pixels.astype(np.float32)


def _original(path: Path, held: dict[str, Any]) -> np.ndarray | None:
    if "HQ_video_or_image" not in held:
        return None
    picture = _picture(path, held, "HQ_video_or_image")
    return None if np.all(images.to_uint8(picture) == PLACEHOLDER) else picture
