"""Where a data set is written: folders that are free, replaced as a whole, or continued."""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from pid_jax.errors import UserError

_OUR_FILES = re.compile(r"dataset\.json|skipped\.jsonl|\.?shard-\d{5}\..*|\.dataset\.json\..*")


@contextlib.contextmanager
def destination(target: Path, overwrite: bool) -> Iterator[Path]:
    """Yields the folder to write into.

    A fresh target is written in place, so that an interrupted run leaves what it packed, and so is
    a data set, which is continued. With `overwrite` a data set stays as it was until its successor
    is complete. A target in which nothing was packed is removed.
    Raises: UserError when the target holds something else, or another process writes it.
    """
    if overwrite and target.is_dir() and any(target.iterdir()):
        with staged_folder(target, overwrite) as stage:
            yield stage
        return
    _check_continuable(target)
    target.mkdir(parents=True, exist_ok=True)
    with only_writer(target, "packing"):
        try:
            yield target
        except BaseException:
            if not any(target.glob("shard-*.arrayrecord")):
                shutil.rmtree(target, ignore_errors=True)
            raise


@contextlib.contextmanager
def only_writer(folder: Path, doing: str) -> Iterator[None]:
    """Holds the folder; the system lets go of it however the process ends.

    Raises: UserError when another process holds it; it says that that one is `doing`.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UserError(f"another process is {doing} into {folder}; wait for its end") from error
    except OSError:  # some network file systems have no locks
        pass
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def staged_folder(target: Path, overwrite: bool) -> Iterator[Path]:
    """Yields an empty folder beside `target` that takes its place on success.

    An existing target is only replaced when `overwrite` is set and `check_destination` allows it;
    it stays untouched until the new folder is complete, and after any failure.
    """
    check_destination(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    stage, old = (target.with_name(f".{target.name}.{role}-{os.getpid()}")
                  for role in ("new", "old"))
    stage.mkdir()
    try:
        yield stage
        if target.exists():
            os.replace(target, old)
        os.replace(stage, target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def check_destination(target: Path, overwrite: bool) -> None:
    """Raises UserError unless `target` is free, or `overwrite` is set and it is a data set.

    A data set is recognised by its files, so that a mistyped path deletes nothing else.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise UserError(f"the destination {target} is a file; name a folder")
    if not overwrite:
        raise UserError(f"the destination {target} is not empty; choose another, or add "
                        "--overwrite to replace the data set in it")
    _check_ours(target, "it is not overwritten: remove it yourself or choose another "
                         "destination")


def _check_continuable(target: Path) -> None:
    """Raises UserError when there is anything but a data set, or the start of one."""
    if target.exists() and not target.is_dir():
        raise UserError(f"the destination {target} is a file; name a folder")
    if target.is_dir():
        _check_ours(target, "name another destination")


def _check_ours(target: Path, advice: str) -> None:
    foreign = next((p for p in sorted(target.rglob("*"))
                    if p.is_file() and not _OUR_FILES.fullmatch(p.name)), None)
    if foreign is not None:
        raise UserError(f"{target} holds {foreign.name}, which is not part of a data set; {advice}")
