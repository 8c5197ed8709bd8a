"""What a compiled program will take of each chip, as a table and as JSON."""

import dataclasses
import math
import re
import resource
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from pid_jax.ahead_of_time import programs
from pid_jax.ahead_of_time.topology import GIB, Topology
from pid_jax.flops import Flops
from pid_jax.parallel import hlo
from pid_jax.parallel.sharding import bytes_per_device

NOTES = (
    "FLOPs are counted in the traced program (loop bodies as often as they turn, attention "
    "included, recomputation not): XLA's cost_analysis counts loop bodies once and Pallas kernels "
    "as 0.",
    "Cycles are XLA's own estimates times the loop turns, without Pallas kernels and without "
    "waiting for collectives: compare programs with them, do not read seconds from them alone.",
    "Bytes of collectives are what one chip receives per run, loop turns included.")

MATMUL_EFFICIENCY = 0.8
"""Share of the peak that large products reach; only ranks candidates."""
ATTENTION_EFFICIENCY = 0.4
"""Share of the peak that attention kernels reach at head widths 64-72 (half-filled units)."""
REMAT_FORWARDS = {"none": (0, 0), "full": (1, 1), "attention": (1, 0)}
"""Forward passes that the backward pass repeats: of products, of attention."""


@dataclasses.dataclass(frozen=True)
class Report:
    """One program on one mesh. Memory in bytes per chip, FLOPs over all chips.

    Attributes:
      arguments: kind -> bytes; `temporaries`: the compiler's working memory; `outputs`: results
        that do not take the place of an argument; `code`: the program itself.
      fits: whether the compiler accepted it; `refusal`: its reason when not.
      cycles, copy_cycles, kernels, collectives, collective_calls, unknown_loops: see `hlo.Summary`.
      seconds: rough lower bound of one run, for ranking.
    """

    topology: str
    devices: int
    device_kind: str
    program: str
    mesh: dict[str, int]
    height: int
    width: int
    batch: int
    remat: str
    flops: Flops
    limit: float
    arguments: dict[str, int]
    fits: bool
    refusal: str = ""
    temporaries: int = 0
    outputs: int = 0
    code: int = 0
    collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)
    collective_calls: Mapping[str, int] = dataclasses.field(default_factory=dict)
    cycles: int = 0
    copy_cycles: int = 0
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unknown_loops: int = 0
    seconds: float = math.inf
    compile_seconds: float = 0.0
    host_memory: int = 0

    @property
    def total(self) -> int:
        """Bytes per chip."""
        return sum(self.arguments.values()) + self.temporaries + self.outputs + self.code

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values; an unknown time is null."""
        plain = vars(self) | {"flops": self.flops._asdict(), "total": self.total}
        return plain | {"seconds": self.seconds if math.isfinite(self.seconds) else None}


def compile_report(config: ConfigDict, topology: Topology, mesh: Mesh, program: str, height: int,
                   width: int, flops: Flops, tile: int = 0) -> Report:
    """Compiles a program and reports; running out of memory is a report with `fits` False.

    Args:
      flops: of the whole program, from `programs.model_flops`.
      tile: side of the tiles of a decode, 0 for whole.
    """
    built = programs.build(config, mesh, program, height, width, tile)
    kind = mesh.devices.flat[0].device_kind or topology.name.partition(":")[0]  # GPUs' is empty
    report = Report(
        topology=topology.name, devices=mesh.size, device_kind=kind,
        program=program, mesh=dict(mesh.shape), height=height, width=width,
        batch=config.data.batch_size, remat=config.model.remat, flops=flops,
        limit=topology.generation.memory, fits=False,
        arguments={name: bytes_per_device(tree) for name, tree in built.parts.items()})
    start = time.monotonic()
    try:
        compiled = built.compile()
    except jax.errors.JaxRuntimeError as error:
        return dataclasses.replace(report, refusal=out_of_memory(error),
                                   compile_seconds=time.monotonic() - start)
    return _measured(report, compiled, topology, time.monotonic() - start)


def _measured(report: Report, compiled: jax.stages.Compiled, topology: Topology,
              compile_seconds: float) -> Report:
    memory, program = compiled.memory_analysis(), hlo.summarise(compiled.as_text())
    report = dataclasses.replace(
        report, fits=True, temporaries=memory.temp_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        code=memory.generated_code_size_in_bytes, compile_seconds=compile_seconds,
        host_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **vars(program))
    return dataclasses.replace(report, seconds=rough_seconds(report, topology))


def out_of_memory(error: Exception) -> str:
    """The compiler's sentence about memory; any other error is raised again."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        raise error
    used = re.search(r"[^.\n]*(?:[Uu]sed [\d.]+\w? of [\d.]+\w?|exceeds available)[^\n]*", text)
    return (used[0] if used else text.splitlines()[0]).strip()[:300]


def rough_seconds(report: Report, topology: Topology) -> float:
    """Kernel time at a guessed share of the peak, plus estimated cycles, plus wire time.

    For ranking meshes and policies against each other; nothing here was timed on a chip.
    """
    chip, chips = topology.generation, report.devices
    products, attention = (REMAT_FORWARDS[report.remat] if report.program == "train" else (0, 0))
    attention_flops = report.flops.attention * (1 + attention / 3)
    busy = attention_flops / (chip.peak * ATTENTION_EFFICIENCY * chips)
    other = report.cycles / chip.clock if report.cycles else (
        report.flops.matmul * (1 + products / 3) / (chip.peak * MATMUL_EFFICIENCY * chips))
    return busy + other + sum(report.collectives.values()) / chip.link


def table(report: Report) -> str:
    """The report for people."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in report.mesh.items())
    lines = [f"{report.program} {report.width}x{report.height}, batch {report.batch}, remat "
             f"{report.remat}, on {report.topology} ({report.devices} x {report.device_kind}), "
             f"mesh {mesh}", ""]
    lines += [f"  {name:<28}{value}" for name, value in _rows(report)]
    return "\n".join([*lines, "", *(f"  note: {note}" for note in NOTES)])


def _rows(report: Report) -> list[tuple[str, str]]:
    gib = lambda size: f"{size / GIB:9.2f} GiB"
    rows = [("memory per chip", "")]
    rows += [(f"  {name}", gib(size)) for name, size in report.arguments.items()]
    if not report.fits:
        return [*rows, ("does not fit", report.refusal)]
    rows += [("  temporaries", gib(report.temporaries)), ("  outputs", gib(report.outputs)),
             ("  code", gib(report.code)),
             ("  total", f"{gib(report.total)} of {report.limit / GIB:.2f}")]
    rows += [("FLOPs of the mathematics", f"{report.flops.total / 1e12:9.1f} TFLOP, attention "
              f"{report.flops.attention / max(report.flops.total, 1):.0%}")]
    rows += [("collectives per chip", "" if report.collectives else "none")]
    rows += [(f"  {kind}", f"{gib(size)} in {report.collective_calls[kind]} calls")
             for kind, size in sorted(report.collectives.items())]
    rows += [("estimated cycles", f"{report.cycles / 1e6:9.0f} M, copies "
              f"{report.copy_cycles / 1e6:.0f} M, kernels left out")]
    rows += [(f"  {name}", f"{calls:9d} calls, not counted")
             for name, calls in sorted(report.kernels.items())]
    if report.unknown_loops:
        rows += [("  loops of unknown length", f"{report.unknown_loops:9d}, counted once")]
    return [*rows, ("rough time, for ranking", f"{report.seconds:9.3f} s"),
            ("compiled in", f"{report.compile_seconds:9.0f} s, host memory "
             f"{report.host_memory / GIB:.1f} GiB")]

