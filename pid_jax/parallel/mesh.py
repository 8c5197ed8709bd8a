"""The device mesh: axes `data`, `fsdp` and `sequence`, checked before anything compiles."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pid_jax.errors import UserError
from pid_jax.parallel import multihost

AXES = ("data", "fsdp", "sequence")
BATCH_AXES = ("data", "fsdp")


def make_mesh(sizes: Mapping[str, int], batch: int, accumulate: int = 1,
              devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh of a run.

    Args:
      sizes: devices along `data`, `fsdp` and `sequence`; at most one is -1: all that are left.
      batch: global batch of one update; its micro-batches must divide over data * fsdp.
      accumulate: micro-batches of one update.
      devices: default all devices. A mesh smaller than their number uses the first ones.
    Raises:
      UserError: sizes that the devices or the batch do not allow.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = resolve_sizes(sizes, len(devices))
    check_batch(shape, batch, accumulate)
    used = devices[:math.prod(shape.values())]
    if len(used) < len(devices) and len({device.process_index for device in devices}) > 1:
        raise UserError(f"the mesh uses {len(used)} of {len(devices)} devices of several "
                        "processes; use all of them, or start fewer processes")
    grid = mesh_utils.create_device_mesh(
        tuple(shape.values()), used, allow_split_physical_axes=True)
    return Mesh(grid, AXES)


def single_device() -> Mesh:
    """The mesh of the first local device alone."""
    return Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1, 1), AXES)


def resolve_sizes(sizes: Mapping[str, int], devices: int) -> dict[str, int]:
    """The mesh shape with -1 filled in from the number of devices."""
    shape = {axis: sizes[axis] for axis in AXES}
    for axis, size in shape.items():
        if size == 0 or size < -1:
            raise UserError(f"config.mesh.{axis} is {size}; expected a positive number or -1")
    open_axes = [axis for axis, size in shape.items() if size == -1]
    if len(open_axes) > 1:
        raise UserError(f"config.mesh has -1 for {' and '.join(open_axes)}; leave one axis open")
    known = math.prod(size for size in shape.values() if size > 0)
    _check_devices(shape, known, devices, bool(open_axes))
    return {axis: devices // known if size == -1 else size for axis, size in shape.items()}


def _check_devices(shape: Mapping[str, int], known: int, devices: int, has_open: bool) -> None:
    text = " x ".join(f"{axis} {size}" for axis, size in shape.items())
    if known > devices:
        raise UserError(f"the mesh {text} needs {known} devices; there are {devices}")
    if has_open and devices % known:
        raise UserError(f"the mesh {text} leaves {known} devices to divide {devices}; "
                        f"choose sizes whose product divides {devices}")


def check_batch(shape: Mapping[str, int], batch: int, accumulate: int) -> None:
    """Refuses a batch whose micro-batches the batch axes of the mesh do not divide."""
    ways = math.prod(shape[axis] for axis in BATCH_AXES)
    if batch % (ways * accumulate):
        raise UserError(
            f"config.data.batch_size is {batch}; data {shape['data']} x fsdp {shape['fsdp']} x "
            f"accumulate {accumulate} asks for a multiple of {ways * accumulate}")


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The leading axis is divided over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def shard_batch(batch: Mapping[str, np.ndarray], mesh: Mesh,
                rows: int | None = None) -> dict[str, jax.Array]:
    """Places a host batch on the mesh.

    Args:
      batch: arrays that hold this process's rows (`multihost.batch_share`), or all of them.
      rows: of the global batch; None: `batch` holds all of them.
    """
    sharding = batch_sharding(mesh)
    rows = len(next(iter(batch.values()))) if rows is None else rows
    share = multihost.batch_share(sharding, rows)
    return {name: multihost.global_array(array, sharding, share) for name, array in batch.items()}
