"""Keeps compiled programs on disk, so that the next process need not compile them again."""

import os
from pathlib import Path

import jax

FOLDER = "pid_jax/compiled"


def enable(folder: str | Path | None = None) -> Path:
    """Turns the cache on; call it before anything compiles.

    Args:
      folder: default: what `JAX_COMPILATION_CACHE_DIR` names, else `pid_jax/compiled` in the user's
        cache folder (`XDG_CACHE_HOME`, or `~/.cache`).
    Returns:
      The folder. `JAX_ENABLE_COMPILATION_CACHE=false` switches the cache off.
    """
    known = jax.config.jax_compilation_cache_dir
    if folder is None and known:
        return Path(known)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / FOLDER if folder is None else Path(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder
