"""Keeps compiled programs on disk, so that the next process need not compile them again."""

import os
from pathlib import Path

import jax

FOLDER = "pid_jax/compiled"


def enable(folder: str | Path | None = None) -> Path | None:
    """Turns the cache on for what is compiled from now on.

    Args:
      folder: default: what `JAX_COMPILATION_CACHE_DIR` names, else `pid_jax/compiled` in the user's
        cache folder (`XDG_CACHE_HOME`, or `~/.cache`).
    Returns:
      The folder; None where there is none, since the user has no home: the cache stays off.
      `JAX_ENABLE_COMPILATION_CACHE=false` switches it off, too.
    """
    known = jax.config.jax_compilation_cache_dir
    if folder is None and known:
        return Path(known)
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if not os.path.isabs(base):
            return None
        folder = Path(base) / FOLDER
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return Path(folder)
