"""Where the time of the steps goes, per process: `performance.jsonl`, and who is slow."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pid_jax.parallel import multihost

FILE = "performance.jsonl"
SLOW_SECONDS = 5.0  # that a batch may keep a step waiting before its reader is named
STRAGGLER = 0.1  # share of a step by which a process waits longer for its data than the quickest
GIB = 2**30


class Performance:
    """Collects the steps between two reports.

    Definitions: a step's seconds run from asking for its batch until the step before has been
    read, samples and checkpoints left out; its data wait is the part until the batch is there.
    images/s counts the global batch; TFLOP/s per device the mathematics of forward and backward
    pass, no recomputation; MFU is that over the device's bfloat16 peak.
    """

    def __init__(self, batch: int, devices: int, peak: float | None):
        """Nothing has been timed.

        Args:
          batch: pictures of a global batch.
          devices: of the whole mesh.
          peak: FLOP/s of all of them, None when not known.
        """
        self._batch, self._devices, self._peak = batch, devices, peak
        self._seconds: list[float] = []
        self._waits: list[float] = []

    def add(self, seconds: float, wait: float) -> None:
        """Takes the times of one step."""
        self._seconds.append(seconds)
        self._waits.append(wait)

    def report(self, flops: float) -> dict[str, Any]:
        """What `performance.jsonl` holds of the steps since the last report; all processes ask.

        Args:
          flops: of one step, 0 when not counted.
        """
        steps, waits = self._seconds or [0.0], self._waits or [0.0]
        mean = sum(steps) / len(steps)
        hosts = multihost.gather({"seconds": mean, "data_wait": sum(waits) / len(waits),
                                  "peak_gib": peak_memory() / GIB})
        self._seconds, self._waits = [], []
        speed = max(hosts["seconds"]) or float("inf")
        values = {"step_seconds": [round(value, 4) for value in steps],
                  "step_data_wait": [round(value, 4) for value in waits],
                  "images_per_second": self._batch / speed, "hosts": hosts}
        if flops:
            values["tflops_per_device"] = flops / speed / self._devices / 1e12
        if flops and self._peak:
            values["mfu"] = flops / speed / self._peak
        return values


def peak_memory() -> float:
    """Bytes that the fullest of this process's devices held at most; 0 where it is not known."""
    return max((device.memory_stats() or {}).get("peak_bytes_in_use", 0)
               for device in jax.local_devices())


def remark(values: Mapping[str, Any]) -> str:
    """The end of the progress line: memory, and the process that keeps all others waiting."""
    hosts = values["hosts"]
    mean, waits = max(max(hosts["seconds"]), 1e-9), hosts["data_wait"]
    text = f" | peak {max(hosts['peak_gib']):.1f} GiB" if max(hosts["peak_gib"]) else ""
    if max(waits) - min(waits) > STRAGGLER * mean:
        slowest = waits.index(max(waits))
        text += (f" | slowest process {slowest}: waits {waits[slowest]:.2f} s a step for its data, "
                 f"the quickest {min(waits):.2f}")
    return text


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """The result and how many seconds it took."""
    began = time.monotonic()
    return function(), time.monotonic() - began
