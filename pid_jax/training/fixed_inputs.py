"""Fixed latent batches that a training draws with its samples: the files of `fixed_batches`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pid_jax.data import latent_files
from pid_jax.data.latent_files import Latents
from pid_jax.encoders.protocols import LatentCodec
from pid_jax.errors import UserError
from pid_jax.sampling_inputs import check_sigma

PICTURES = ("small", "truth")


def read(paths: Sequence[str], codec: LatentCodec, scale: int) -> dict[str, Any]:
    """Reads latent files and folders of .npz files into one batch.

    Args:
      scale: pixels of a drawn picture per pixel of the encoded one.
    Returns:
      `latent` float32 [B, h, w, C], `sigma` float32 [B], `caption` B texts, and, where every file
      holds them, the pictures `small` and `truth`, float32 in [-1, 1].
    Raises:
      UserError: no file, one of another codec, with a noise level that is none or pictures of
        another size, or latents of several sizes.
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
    for file, latents in zip(files, found):
        _check(file, latents, codec.spatial_factor, scale)
    counts = [len(latents.latents) for latents in found]
    batch = {"latent": np.concatenate([latents.latents for latents in found]),
             "sigma": np.float32(sum((latents.sigma or [0.0] * count for latents, count
                                      in zip(found, counts)), [])),
             "caption": sum((latents.prompts or [""] * count for latents, count
                             in zip(found, counts)), [])}
    return batch | {name: np.concatenate([getattr(latents, name) for latents in found])
                    for name in PICTURES
                    if all(getattr(latents, name) is not None for latents in found)}


def _check(file: Path, latents: Latents, factor: int, scale: int) -> None:
    """Refuses what would stop the run at its first samples."""
    check_sigma(latents.sigma or ())
    for name, cell in zip(PICTURES, (factor, factor * scale)):
        pictures = getattr(latents, name)
        size = tuple(side * cell for side in latents.latents.shape[1:3])
        if pictures is not None and pictures.shape[1:3] != size:
            array = "lq" if name == "small" else name
            raise UserError(f"{file} holds pictures {array!r} of {pictures.shape[1]} x "
                            f"{pictures.shape[2]} pixels; its latents stand for {size[0]} x "
                            f"{size[1]} (config.model.sr_scale {scale})")
