"""Which mesh and remat policy to take: candidates in the order of promise, compiled until K fit."""

import copy
import dataclasses
import itertools
import logging
from collections.abc import Iterator

from ml_collections import ConfigDict

from pid_jax.ahead_of_time import programs
from pid_jax.ahead_of_time.report import REMAT_FORWARDS, Report, compile_report
from pid_jax.ahead_of_time.topology import GIB, Topology
from pid_jax.errors import UserError
from pid_jax.flops import Flops
from pid_jax.parallel.mesh import AXES, make_mesh
from pid_jax.parallel.sharding import bytes_per_device

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh shape with a remat policy."""

    shape: tuple[int, int, int]
    remat: str


def candidates(devices: int, batch: int, accumulate: int, tokens: int, heads: tuple[int, ...],
               policies: tuple[str, ...]) -> list[Candidate]:
    """Every mesh that divides batch and tokens evenly, the most promising first.

    Order: policies that repeat less before those that repeat more; within a policy, meshes whose
    sequence axis divides all heads first, then the shortest sequence axis, then parameters
    divided over more devices.
    """
    rows = batch // accumulate
    shapes = [shape for shape in _factorisations(devices)
              if rows % (shape[0] * shape[1]) == 0 and tokens % shape[2] == 0]
    if not shapes:
        raise UserError(f"no mesh of {devices} devices divides {rows} pictures and {tokens} "
                        "image tokens; choose another batch, picture size or topology")
    found = [Candidate(shape, remat) for remat in policies for shape in shapes]
    return sorted(found, key=lambda c: _promise(c, heads))


def _factorisations(devices: int) -> Iterator[tuple[int, int, int]]:
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for data, fsdp in itertools.product(divisors, divisors):
        if devices % (data * fsdp) == 0:
            yield data, fsdp, devices // (data * fsdp)


def _promise(candidate: Candidate, heads: tuple[int, ...]) -> tuple:
    data, _, sequence = candidate.shape
    gathers = any(count % sequence for count in heads)
    repeats = sum(REMAT_FORWARDS[candidate.remat])
    return repeats, gathers, sequence, data


def search(config: ConfigDict, topology: Topology, program: str, height: int, width: int,
           flops: Flops, wanted: int) -> list[Report]:
    """Compiles candidates until `wanted` of them fit; the fastest first, then what did not fit.

    A candidate whose arguments alone exceed the limit is not compiled.
    """
    policies = ("none", "attention", "full") if program == "train" else ("none",)
    model = config.model
    found = candidates(
        len(topology.devices), config.data.batch_size, config.optim.accumulate,
        height * width // model.patch_size**2, (model.num_groups, model.pixel_num_groups), policies)
    reports: list[Report] = []
    for candidate in found:
        report = _try(config, topology, program, height, width, flops, candidate)
        if report is not None:
            logger.info("%s", one_line(report))
            reports.append(report)
        if sum(report.fits for report in reports) == wanted:
            break
    return sorted(reports, key=lambda report: (not report.fits, report.seconds))


def _try(config: ConfigDict, topology: Topology, program: str, height: int, width: int,
         flops: Flops, candidate: Candidate) -> Report | None:
    config = copy.deepcopy(config)
    config.model.remat = candidate.remat
    mesh = make_mesh(dict(zip(AXES, candidate.shape)), config.data.batch_size,
                     config.optim.accumulate, topology.devices)
    built = programs.build(config, mesh, program, height, width)
    if bytes_per_device(built.arguments) > topology.generation.memory:
        return None
    return compile_report(config, topology, mesh, program, height, width, flops)


def one_line(report: Report) -> str:
    """A candidate's result on a line of the ranking."""
    mesh = "x".join(str(size) for size in report.mesh.values())
    if not report.fits:
        return f"mesh {mesh:<10} remat {report.remat:<10} does not fit: {report.refusal}"
    return (f"mesh {mesh:<10} remat {report.remat:<10} {report.total / GIB:7.2f} of "
            f"{report.limit / GIB:.2f} GiB, collectives "
            f"{sum(report.collectives.values()) / GIB:6.2f} GiB, "
            f"{report.cycles / 1e6:6.0f} Mcycles, rough {report.seconds:.3f} s")

