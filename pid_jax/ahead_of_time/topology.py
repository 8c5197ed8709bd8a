"""Named machines to compile for: TPU slices through libtpu, NVIDIA GPUs through the CUDA plugin.

Nothing here needs the hardware. Names are `<generation>:<shape>` as libtpu knows them ("v5e:8x8",
"v5p:2x2x4"), or `<generation>:<n>` for the first n chips of the smallest slice ("v5e:1"), or
"h100:<devices>" and "h100:<hosts>x<devices per host>".
"""

import dataclasses
import os
import re
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from pid_jax.errors import UserError

GIB = 2**30

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # libtpu asks no metadata server what machine this is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several compilations may run side by side
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # the CUDA plugin loads without a driver
}


@dataclasses.dataclass(frozen=True)
class Generation:
    """One kind of chip.

    Attributes:
      smallest: the smallest slice that libtpu describes.
      memory: bytes of one device that the compiler lets a program use (read off its refusals).
      peak: dense bfloat16 FLOP/s of one device; v4 slices are described as two devices a chip.
      clock: Hz, to turn estimated cycles into seconds.
      link: bytes/s that one device receives over all its links to neighbours.
    """

    smallest: str
    memory: float
    peak: float
    clock: float
    link: float


GENERATIONS = {
    "v4": Generation("2x2x1", 15.25 * GIB, 137.5e12, 1.05e9, 1.2e11),
    "v5e": Generation("2x2", 15.75 * GIB, 197e12, 1.5e9, 2.0e11),
    "v5p": Generation("2x2x1", 95.74 * GIB, 459e12, 1.75e9, 6.0e11),
    "v6e": Generation("2x2", 31.25 * GIB, 918e12, 1.5e9, 4.48e11),
    "tpu7x": Generation("2x2x1", 94.75 * GIB, 1153.5e12, 1.9e9, 6.0e11),
    "h100": Generation("8", 79.0 * GIB, 989e12, 1.98e9, 4.5e11),
}

# Facts of an H100 SXM that XLA:GPU compiles for (NVIDIA data sheet, CUDA programming guide).
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 85028896768 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
"""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine to compile for."""

    name: str
    generation: Generation
    devices: Sequence[jax.Device]


def prepare() -> None:
    """Keeps jax on the CPU and the vendors' libraries from looking for hardware.

    Call it before anything asks jax for a device.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")


def open_topology(name: str) -> Topology:
    """The machine called `name`.

    Raises:
      UserError: a name that means nothing, or a vendor library that is not installed.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", name)
    if not match or match[1] not in GENERATIONS:
        raise UserError(f"topology {name!r} is unknown; expected <generation>:<shape>, for "
                        f"example v5e:8x8, with one of {', '.join(GENERATIONS)}")
    generation, shape = match.groups()
    found = _gpus(name, shape) if generation == "h100" else _tpus(name, generation, shape)
    return Topology(name, GENERATIONS[generation], found)


def _tpus(name: str, generation: str, shape: str) -> Sequence[jax.Device]:
    count = int(shape) if shape.isdigit() else None
    slice_name = f"{generation}:{GENERATIONS[generation].smallest}" if count else name
    devices = _describe(name, slice_name, "tpu", "libtpu (pip install libtpu)")
    if count and count > len(devices):
        raise UserError(f"topology {name!r}: the smallest slice has {len(devices)} devices; name "
                        f"a larger one by its shape, for example {generation}:4x4")
    return devices[:count]


def _gpus(name: str, shape: str) -> Sequence[jax.Device]:
    hosts, devices = shape.split("x") if "x" in shape else ("1", shape)
    return _describe(name, "", "cuda", "the CUDA plugin (pip install jax[cuda12])",
                     topology=f"1x{hosts}x{devices}", target_config=H100)


def _describe(name: str, slice_name: str, platform: str, library: str,
              **options: str) -> Sequence[jax.Device]:
    try:
        return topologies.get_topology_desc(slice_name, platform, **options).devices
    except Exception as error:  # the vendors' libraries raise several unrelated types
        reason = str(error).splitlines()[0][:200]
        raise UserError(f"topology {name!r} cannot be opened: {reason}; is {library} installed, "
                        "and does the shape exist?") from error
