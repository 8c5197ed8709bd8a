"""Reading latents that any program saved: .npy, .npz and .safetensors, single or batch.

A .npy file is the latent alone. In the others it is the array called `latent`, `latents` or
`samples`, or the only one there is; beside it may lie `sigma`, the noise level(s) of the latents,
and in .npz files `prompt`, their caption(s).
"""

import dataclasses
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from pid_jax.encoders import CHANNELS
from pid_jax.errors import UserError

LATENT_NAMES = ("latent", "latents", "samples")
LAYOUTS = ("auto", "channels_last", "channels_first")


@dataclasses.dataclass(frozen=True)
class Latents:
    """What a file holds.

    Attributes:
      latents: float32 [B, h, w, C].
      sigma: B noise levels, or None when the file does not say.
      prompts: B captions, or None when the file does not say.
    """

    latents: np.ndarray
    sigma: list[float] | None
    prompts: list[str] | None


def read(path: Path, channels: int, family: str, layout: str = "auto") -> Latents:
    """Reads one file.

    Args:
      path: a .npy, .npz or .safetensors file; pickled contents are refused.
      channels, family: of the latents that the network reads.
      layout: "channels_last" ([B,] h, w, C), "channels_first" ([B,] C, h, w), or "auto": the axis
        that has `channels` entries, the last one where both have.
    Raises:
      UserError: no such file, unreadable, no latent in it, or one that does not fit.
    """
    arrays = _read_arrays(Path(path))
    latents = channels_last(_find_latent(arrays, path), channels, family, layout, path)
    return Latents(latents, _sigma(arrays, len(latents), path),
                   _prompts(arrays, len(latents), path))


def channels_last(latents: np.ndarray, channels: int, family: str, layout: str, path: Path
                  ) -> np.ndarray:
    """Latents of any accepted layout as float32 [B, h, w, C]."""
    if layout not in LAYOUTS:
        raise UserError(f"layout {layout!r} is unknown; choose one of {', '.join(LAYOUTS)}")
    wanted = (f"this checkpoint reads {family!r} latents with {channels} channels: [batch, height, "
              f"width, {channels}] or [batch, {channels}, height, width], or without the batch")
    if latents.ndim not in (3, 4) or latents.dtype.kind not in "fiuV" or not latents.size:
        raise UserError(f"{path} holds {latents.dtype} of shape {latents.shape}; {wanted}")
    batch = latents.reshape((-1,) + latents.shape[-3:])
    if layout != "channels_first" and batch.shape[-1] == channels:
        return batch.astype(np.float32)
    if layout != "channels_last" and batch.shape[1] == channels:
        return np.moveaxis(batch, 1, -1).astype(np.float32)
    raise UserError(f"{path} has shape {latents.shape}{_family_of(batch)}; {wanted}. Latents of "
                    "another family need a checkpoint of that family")


def _family_of(batch: np.ndarray) -> str:
    """Which latent family has so many channels, where one alone does."""
    found = {family: channels for family, channels in CHANNELS.items()
             if channels in (batch.shape[1], batch.shape[-1])}
    if len(found) != 1:
        return ""
    (family, channels), = found.items()
    return f" (as {channels}-channel {family} latents have)"


def _read_arrays(path: Path) -> Mapping[str, np.ndarray]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path} is no latent file; expected one of {', '.join(READERS)}")
    if not path.is_file():
        raise UserError(f"there is no latent file {path}")
    try:
        return reader(path)
    except UserError:
        raise
    except (ValueError, EOFError, KeyError, TypeError, struct.error, zipfile.BadZipFile,
            zipfile.LargeZipFile, NotImplementedError, OverflowError, MemoryError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error


def _read_npy(path: Path) -> dict[str, np.ndarray]:
    with open(path, "rb") as file:
        return {"latent": np.lib.format.read_array(file, allow_pickle=False)}


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name.endswith(".npy")]
        arrays = {}
        for name in members:
            with archive.open(name) as member:
                arrays[name.removesuffix(".npy")] = np.lib.format.read_array(
                    member, allow_pickle=False)
    return arrays


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    import safetensors
    from safetensors.flax import load_file  # unlike its numpy sister, it reads bfloat16

    try:
        return {name: np.asarray(value) for name, value in load_file(str(path)).items()}
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}") from error


READERS: dict[str, Callable[[Path], dict[str, np.ndarray]]] = {
    ".npy": _read_npy, ".npz": _read_npz, ".safetensors": _read_safetensors}


def _find_latent(arrays: Mapping[str, np.ndarray], path: Path) -> np.ndarray:
    for name in LATENT_NAMES:
        if name in arrays:
            return arrays[name]
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    raise UserError(f"{path} holds {', '.join(sorted(arrays)) or 'nothing'}; call the latent one "
                    f"of {', '.join(LATENT_NAMES)}")


def _sigma(arrays: Mapping[str, np.ndarray], count: int, path: Path) -> list[float] | None:
    if "sigma" not in arrays:
        return None
    sigma = np.asarray(arrays["sigma"])
    if sigma.dtype.kind not in "fiuV" or sigma.size not in (1, count):
        raise UserError(f"sigma in {path} is {sigma.dtype} of shape {sigma.shape}; expected one "
                        f"number, or one for each of the {count} latents")
    return np.broadcast_to(sigma.astype(np.float64).reshape(-1), (count,)).tolist()


def _prompts(arrays: Mapping[str, np.ndarray], count: int, path: Path) -> list[str] | None:
    if "prompt" not in arrays:
        return None
    prompts = np.asarray(arrays["prompt"])
    if prompts.dtype.kind != "U" or prompts.size not in (1, count):
        raise UserError(f"prompt in {path} is {prompts.dtype} of shape {prompts.shape}; expected "
                        f"one text, or one for each of the {count} latents")
    return [str(text) for text in np.broadcast_to(prompts.reshape(-1), (count,))]
