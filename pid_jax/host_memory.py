"""Memory of a process that computes on a CPU."""

import ctypes
import os
from collections.abc import Sequence

import jax

# Of glibc's <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
SETTINGS = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1))


def keep_freed_memory() -> bool:
    """Lets glibc keep what this process frees, where JAX is told to compute on a CPU only.

    XLA asks malloc for the temporaries of a step and frees them after it. Blocks of this size go
    back to the kernel, which clears every page again for the next step (docs/speed.md). The price
    is that the process stays as large as it ever was.

    Call it before JAX opens its devices: threads that have an arena of their own keep it.

    Returns:
      Whether it was done: not on accelerators or another C library, nor where the environment
      has settings of malloc (`MALLOC_...` or `GLIBC_TUNABLES`).
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    return jax.config.jax_platforms == "cpu" and not chosen and set_malloc(SETTINGS)


def set_malloc(settings: Sequence[tuple[int, int]]) -> bool:
    """Hands (option, value) pairs to glibc's `mallopt`; gives False where there is none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(*setting) for setting in settings])
