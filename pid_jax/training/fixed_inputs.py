"""Fixed latent batches that a training draws with its samples: the files of `fixed_batches`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pid_jax import images
from pid_jax.data import latent_files
from pid_jax.encoders.protocols import LatentCodec
from pid_jax.errors import UserError

PICTURES = {"lq": "small", "truth": "truth"}


def read(paths: Sequence[str], codec: LatentCodec) -> dict[str, Any]:
    """Reads latent files and folders of .npz files into one batch.

    Returns:
      `latent` float32 [B, h, w, C], `sigma` float32 [B], `caption` B texts, and, where every file
      holds them, the pictures `small` and `truth`, float32 in [-1, 1].
    Raises:
      UserError: no file, one of another codec or without a noise level, or sizes that differ.
    """
    files = [file for path in map(Path, paths)
             for file in (sorted(path.glob("*.npz")) if path.is_dir() else [path])]
    if not files:
        raise UserError(f"config.sample.batches {tuple(paths)!r} holds no .npz file; make some with "
                        "python -m pid_jax.fixed_batches")
    found = [latent_files.read(file, codec.channels, codec.family) for file in files]
    shapes = sorted({latents.latents.shape[1:] for latents in found})
    if len(shapes) > 1:
        raise UserError(f"config.sample.batches holds latents of several shapes, {shapes[0]} and "
                        f"{shapes[1]}; a run draws those of one")
    counts = [len(latents.latents) for latents in found]
    batch = {"latent": np.concatenate([latents.latents for latents in found]),
             "sigma": np.float32(sum((latents.sigma or [0.0] * count for latents, count
                                      in zip(found, counts)), [])),
             "caption": sum((latents.prompts or [""] * count for latents, count
                             in zip(found, counts)), [])}
    return batch | _pictures(files)


def _pictures(files: Sequence[Path]) -> dict[str, np.ndarray]:
    """The pictures that every file holds."""
    held = []
    for file in files:
        if file.suffix != ".npz":
            return {}
        with np.load(file, allow_pickle=False) as arrays:
            held.append({name: arrays[name] for name in PICTURES if name in arrays.files})
    return {ours: images.to_float(np.concatenate([arrays[theirs] for arrays in held]))
            for theirs, ours in PICTURES.items() if all(theirs in arrays for arrays in held)}
