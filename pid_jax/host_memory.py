"""Memory of a process that computes on a CPU."""

import ctypes
import os
from collections.abc import Sequence

import jax

# Of glibc's <malloc.h> and of Linux's <sys/mman.h>.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
MADV_HUGEPAGE = 14
SETTINGS = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1))
HUGE_PAGE = 2**21


def keep_freed_memory() -> bool:
    """Lets glibc keep what this process frees, where JAX is told to compute on a CPU only.

    XLA asks malloc for the temporaries of a step and frees them after it. Blocks of this size go
    back to the kernel, which clears every page again for the next step (docs/speed.md). Kept, they
    lie in huge pages where the kernel has such. The price is that the process stays as large as it
    ever was.

    Call it before JAX opens its devices: threads that have an arena of their own keep it.

    Returns:
      Whether it was done: not on accelerators or another C library, nor where the environment
      has settings of malloc (`MALLOC_...` or `GLIBC_TUNABLES`).
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if jax.config.jax_platforms != "cpu" or chosen or not set_malloc(SETTINGS):
        return False
    _ask_for_huge_pages(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return True


def set_malloc(settings: Sequence[tuple[int, int]]) -> bool:
    """Hands (option, value) pairs to glibc's `mallopt`; gives False where there is none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(*setting) for setting in settings])


def _ask_for_huge_pages(size: int) -> None:
    """Reserves `size` bytes of addresses at the end of the heap, none of them memory before it is
    written, and asks the kernel for huge pages there; where it refuses, pages stay small."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    block = libc.malloc(size)
    if block:
        start = -(-block // HUGE_PAGE) * HUGE_PAGE
        libc.madvise(start, (block + size - start) // HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE)
        libc.free(block)
