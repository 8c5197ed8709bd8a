"""Reading latents that any program saved: .npy, .npz and .safetensors, single or batch.

A .npy file is the latent alone. In the others it is the array called `latent`, `latents`, `samples`
or `LQ_latent`, or the only one there is. Beside it may lie, in the same file, in a JSON file of the
same name (numbers and texts) or in a .safetensors' metadata (texts):

    sigma, degrade_sigma    noise level(s) of the latents
    prompt, caption         their text(s)
    caption_embs            or their embeddings [B, T, E], made elsewhere
    frame                   scale of the noised latents: flow, vp or euler
    lq, truth               uint8 pictures: what was encoded, and the original
    noise, step_noise       starting noise and that of each step, in the place of a seed's
"""

import dataclasses
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pid_jax import images
from pid_jax.data import latent_layouts
from pid_jax.data.latent_layouts import LAYOUTS
from pid_jax.errors import UserError, one_line

__all__ = ["LAYOUTS", "Latents", "read"]
LATENT_NAMES = ("latent", "latents", "samples", "LQ_latent")
SIGMA_NAMES = ("sigma", "degrade_sigma")
PROMPT_NAMES = ("prompt", "caption")
EMBEDDING_NAMES = ("caption_embs", "embeddings")
BESIDE = (*SIGMA_NAMES, *PROMPT_NAMES, "frame")  # what a JSON file or metadata may say
TEXTS = (*PROMPT_NAMES, "frame")  # what a .safetensors' metadata may say
MOST_BESIDE = 1 << 20  # bytes


@dataclasses.dataclass(frozen=True)
class Latents:
    """What a file holds; None where it does not say.

    Attributes:
      latents: float32 [B, h, w, C].
      sigma: B noise levels.
      prompts: B captions; embeddings: or theirs, float [B, T, E].
      frame: "flow", "vp" or "euler".
      small, truth: float32 [B, H, W, 3] in [-1, 1].
      noise: [B, H, W, 3]; step_noise: [N - 1, B, H, W, 3].
    """

    latents: np.ndarray
    sigma: list[float] | None = None
    prompts: list[str] | None = None
    embeddings: np.ndarray | None = None
    frame: str | None = None
    small: np.ndarray | None = None
    truth: np.ndarray | None = None
    noise: np.ndarray | None = None
    step_noise: np.ndarray | None = None


def read(path: Path, channels: int, family: str, layout: str = "auto",
         picture: tuple[int, int] | None = None,
         statistics: latent_layouts.Statistics | None = None) -> Latents:
    """Reads one file.

    Args:
      path: a .npy, .npz or .safetensors file; pickled contents are refused.
      channels, family: of the latents that the network reads.
      layout, picture, statistics: see `latent_layouts.bring`.
    Raises:
      UserError: no such file, unreadable, no latent in it, or one that does not fit.
    """
    path = Path(path)
    arrays = _read_arrays(path)
    arrays = _beside(path) | arrays
    latents = latent_layouts.bring(_find_latent(arrays, path), channels, family, layout, path,
                                   picture, statistics)
    count = len(latents)
    return Latents(latents, _sigma(arrays, count, path), _prompts(arrays, count, path),
                   _embeddings(arrays, count, path), _frame(arrays, path),
                   _pictures(arrays, "lq", count, path), _pictures(arrays, "truth", count, path),
                   _noise(arrays, "noise", path), _noise(arrays, "step_noise", path))


def _beside(path: Path) -> dict[str, np.ndarray]:
    """What a JSON file of the same name says."""
    note = path.with_suffix(".json")
    if not note.is_file():
        return {}
    if note.stat().st_size > MOST_BESIDE:
        raise UserError(f"{note} is too large to describe {path.name}")
    try:
        held = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{note} cannot be read: {one_line(error, 100)}") from error
    return _described(held, note)


def _described(held: Any, where: Path) -> dict[str, np.ndarray]:
    if not isinstance(held, dict):
        raise UserError(f"{where} is no JSON object; write {{\"prompt\": ..., \"sigma\": ...}}")
    try:
        return {name: np.array(value) for name, value in held.items() if name in BESIDE}
    except ValueError as error:
        raise UserError(f"{where} holds a ragged list: {error}") from error


def _read_arrays(path: Path) -> Mapping[str, np.ndarray]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path} is no latent file; expected one of {', '.join(READERS)}")
    if not path.is_file():
        raise UserError(f"there is no latent file {path}")
    try:
        arrays = reader(path)
    except UserError:
        raise
    except Exception as error:  # Archives and headers raise whatever a damaged file provokes.
        raise UserError(f"{path} cannot be read: {one_line(error, 200)}") from error
    for name, array in arrays.items():
        if array.dtype.type is np.void:
            raise UserError(f"{path}: {name} is {array.dtype}, which are no numbers (.npy and .npz "
                            "do not keep bfloat16); save it as float32")
    return arrays


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
        with safetensors.safe_open(str(path), "numpy") as file:
            metadata = file.metadata() or {}
        described = _described({name: metadata[name] for name in TEXTS if name in metadata}, path)
        return described | {name: np.asarray(value)
                            for name, value in load_file(str(path)).items()}
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}") from error


READERS: dict[str, Callable[[Path], dict[str, np.ndarray]]] = {
    ".npy": _read_npy, ".npz": _read_npz, ".safetensors": _read_safetensors}


def _find_latent(arrays: Mapping[str, np.ndarray], path: Path) -> np.ndarray:
    name = _known(arrays, LATENT_NAMES)
    if name is not None:
        return arrays[name]
    unnamed = [name for name in arrays if name not in BESIDE]
    if len(unnamed) == 1:
        return arrays[unnamed[0]]
    raise UserError(f"{path} holds {', '.join(sorted(arrays)) or 'nothing'}; call the latent one "
                    f"of {', '.join(LATENT_NAMES)}")


def _known(arrays: Mapping[str, np.ndarray], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in arrays), None)


def _sigma(arrays: Mapping[str, np.ndarray], count: int, path: Path) -> list[float] | None:
    name = _known(arrays, SIGMA_NAMES)
    if name is None:
        return None
    sigma = np.asarray(arrays[name])
    if sigma.dtype.kind not in "fiuV" or sigma.size not in (1, count):
        raise UserError(f"{name} in {path} is {sigma.dtype} of shape {sigma.shape}; expected one "
                        f"number, or one for each of the {count} latents")
    return np.broadcast_to(sigma.astype(np.float64).reshape(-1), (count,)).tolist()


def _prompts(arrays: Mapping[str, np.ndarray], count: int, path: Path) -> list[str] | None:
    name = _known(arrays, PROMPT_NAMES)
    if name is None:
        return None
    prompts = np.asarray(arrays[name])
    if prompts.dtype.kind != "U" or prompts.size not in (1, count):
        raise UserError(f"{name} in {path} is {prompts.dtype} of shape {prompts.shape}; expected "
                        f"one text, or one for each of the {count} latents")
    return [str(text) for text in np.broadcast_to(prompts.reshape(-1), (count,))]


def _embeddings(arrays: Mapping[str, np.ndarray], count: int, path: Path) -> np.ndarray | None:
    name = _known(arrays, EMBEDDING_NAMES)
    if name is None:
        return None
    found = np.asarray(arrays[name])
    if found.dtype.kind not in "fV" or found.ndim != 3 or len(found) not in (1, count):
        raise UserError(f"{name} in {path} is {found.dtype} of shape {found.shape}; expected "
                        f"caption embeddings [{count}, tokens, width]")
    return np.broadcast_to(found.astype(np.float32), (count, *found.shape[1:]))


def _frame(arrays: Mapping[str, np.ndarray], path: Path) -> str | None:
    if "frame" not in arrays:
        return None
    frame = np.asarray(arrays["frame"])
    if frame.dtype.kind != "U" or frame.size != 1:
        raise UserError(f"frame in {path} is {frame.dtype} of shape {frame.shape}; expected one "
                        "text")
    return str(frame.reshape(-1)[0])


def _noise(arrays: Mapping[str, np.ndarray], name: str, path: Path) -> np.ndarray | None:
    if name in arrays and arrays[name].dtype.kind not in "fiuV":
        raise UserError(f"{name} in {path} is {arrays[name].dtype}; expected numbers")
    return arrays.get(name)


def _pictures(arrays: Mapping[str, np.ndarray], name: str, count: int, path: Path
              ) -> np.ndarray | None:
    if name not in arrays:
        return None
    found = np.asarray(arrays[name])
    if found.dtype != np.uint8 or found.ndim != 4 or found.shape[-1] != 3 or len(found) != count:
        raise UserError(f"{name} in {path} is {found.dtype} of shape {found.shape}; expected uint8 "
                        f"[{count}, height, width, 3]")
    return images.to_float(found)
