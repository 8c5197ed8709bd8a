"""Paths of checkpoints: a folder here, or `gs://bucket/folder` (with `pip install gcsfs`)."""

import os
import shutil
from pathlib import Path

from etils import epath

from pid_jax.errors import UserError


def as_path(place: str | os.PathLike) -> Path | epath.Path:
    """An absolute path with the methods of `pathlib`, on a disk or in a bucket.

    Raises:
      UserError: another kind of address.
    """
    if not is_remote(place):
        return Path(place).absolute()
    try:
        return epath.Path(place)
    except KeyError as error:
        raise UserError(f"{place} is no place for checkpoints; expected a folder or "
                        "gs://BUCKET/FOLDER") from error


def exists(path: Path | epath.Path) -> bool:
    """Whether something is there.

    Raises:
      UserError: it cannot be looked up: no package that reads the bucket, no such form of name.
    """
    try:
        return path.exists()
    except (ImportError, OSError) as error:
        raise UserError(f"{str(path)[:200]} cannot be reached: "
                        f"{getattr(error, 'strerror', None) or error}") from error


def is_remote(place: str | os.PathLike) -> bool:
    """Whether the path names a bucket."""
    return "://" in os.fspath(place)


def free_bytes(folder: str | os.PathLike) -> int | None:
    """Room on the disk of a folder, made or not; None in a bucket, which has no end."""
    if is_remote(folder):
        return None
    folder = Path(folder).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def refuse_full(folder: str | os.PathLike, needed: int, what: str) -> None:
    """Raises UserError when a disk has less room than `needed` bytes."""
    free = free_bytes(folder)
    if free is not None and free < needed:
        raise UserError(f"{what} takes {needed / 2**30:.2f} GiB and the disk of {folder} has "
                        f"{free / 2**30:.2f}; make room or choose another --workdir")
