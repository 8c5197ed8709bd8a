"""Interleaved repeats of several functions, and the record of a run."""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata

import jax

from pid_jax import host_memory
from pid_jax.files import atomic_write

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def keep_freed_memory() -> None:
    """Computes on the CPU and keeps freed memory, as a training there does; ends the command where
    that cannot be. Call it before anything else of JAX."""
    jax.config.update("jax_platforms", "cpu")
    if not host_memory.keep_freed_memory():
        sys.exit("error: malloc's settings cannot be changed here; this needs glibc, and none of "
                 "MALLOC_... and GLIBC_TUNABLES in the environment")


def interleaved(functions: Mapping[str, Callable[[], object]],
                repeats: int) -> dict[str, list[float]]:
    """Seconds of every call: one uncounted call of each, then `repeats` rounds A B C A B C ..."""
    for function in functions.values():
        jax.block_until_ready(function())
    seconds = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def report(title: str, seconds: Mapping[str, list[float]], path: str | None = None,
           **facts: object) -> None:
    """Prints min, median and max of each row, and writes them with machine and versions."""
    print(f"{title}  ({machine()['cpus']} CPUs, {machine()['device']}, jax {jax.__version__})")
    print(f"{'':28}{'min s':>9}{'median s':>10}{'max s':>9}{'runs':>6}")
    for name, values in seconds.items():
        print(f"{name:28}{min(values):9.3f}{statistics.median(values):10.3f}"
              f"{max(values):9.3f}{len(values):6}")
    if path:
        with atomic_write(path) as file:
            json.dump({"title": title, "machine": machine(), "facts": facts,
                       "seconds": dict(seconds)}, file, indent=1)


def machine() -> dict[str, object]:
    """What was measured on: processor count, device kind, Python and package versions."""
    return {"cpus": len(os.sched_getaffinity(0)), "device": jax.devices()[0].device_kind,
            "system": platform.machine(), "python": sys.version.split()[0],
            "versions": {name: metadata.version(name) for name in PACKAGES}}
