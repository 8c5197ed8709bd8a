"""What is looked at before anything expensive, and the page of log that a run opens with."""

import hashlib
import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from ml_collections import ConfigDict

from pid_jax.config import to_json
from pid_jax.errors import UserError
from pid_jax.objectives.base import Objective
from pid_jax.parallel import mesh as mesh_lib
from pid_jax.parallel import multihost
from pid_jax.parallel.sharding import bytes_per_device, state_shardings
from pid_jax.training import checkpoint, run_record, storage
from pid_jax.training.checkpoint import with_shardings
from pid_jax.training.state import TrainState

logger = logging.getLogger(__name__)

GIB = 2**30
SHARED_SECONDS = 20.0  # in which a file of one host appears on the others


def check_processes(config: ConfigDict) -> None:
    """Refuses processes that run other code, another config, other packages or other devices."""
    if jax.process_count() == 1:
        return
    devices = f"{len(jax.local_devices())} x {jax.local_devices()[0].device_kind}"
    code, packages = run_record.code()["code_sha256"], run_record.versions()
    for text, what in ((to_json(config), "the config"), (code, "the code of pid_jax"),
                       (json.dumps([packages["python"], packages["packages"]]),
                        "a version of Python or of a package"),
                       (devices, f"the kind or number of devices (here {devices})")):
        multihost.refuse_difference(text, what)


def check_shared(workdir: Path) -> None:
    """Refuses a workdir that is another folder on another host."""
    if jax.process_count() == 1:
        return
    token = np.frombuffer(os.urandom(4), np.uint32)
    token = int(multihost_utils.broadcast_one_to_all(token)[0])
    mark = workdir / f".shared-{token:08x}"
    if multihost.is_writer():
        mark.touch()
    multihost.barrier("the mark is in the workdir")
    seen = _appears(mark)
    lost = multihost.in_any(not seen)
    if multihost.is_writer():
        mark.unlink()
    if lost:
        raise UserError(f"--workdir {workdir} is not one folder for all processes "
                        f"({'another process' if seen else 'this one'} does not see what process 0 "
                        "writes); name a folder on shared storage, or set "
                        "config.checkpoint.folder=gs://BUCKET/RUN")


def _appears(path: Path) -> bool:
    """Whether a file of another host is seen; network file systems need a moment."""
    end = time.monotonic() + SHARED_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            return False
        os.listdir(path.parent)  # makes NFS ask again
        time.sleep(0.2)
    return True


def planned_state(objective: Objective, mesh: Mesh) -> TrainState:
    """Shapes of the state with the places that the rules give them."""
    abstract = objective.abstract_state
    return with_shardings(abstract, state_shardings(abstract, mesh))


def memory_plan(state: TrainState) -> dict[str, int]:
    """Bytes on one device, by part. Gradients are as large as the parameters that train, at most
    the parameters; activations are not in it (`pid_jax.parallel.aot` compiles them)."""
    parts = {"parameters": state.params, "gradients": state.params, "optimizer": state.opt_state,
             "averages": state.ema, "other networks": (state.companions, state.frozen)}
    return {name: bytes_per_device(tree) for name, tree in parts.items()}


def device_memory() -> int:
    """Bytes that a program may use on a device here; CPU devices share the host's memory."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        return limit
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()


def check_memory(plan: dict[str, int]) -> None:
    """Refuses a state that does not fit a device, before it is made."""
    needed, limit = sum(plan.values()), device_memory()
    if needed > limit:
        raise UserError(f"parameters, gradients, optimizer and averages take {needed / GIB:.1f} "
                        f"GiB on each device, which has {limit / GIB:.1f}; divide them over more "
                        "devices with config.mesh.fsdp, or train a smaller network")


def checkpoint_bytes(state: TrainState) -> int:
    """Size of one checkpoint before compression."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
               for leaf in jax.tree.leaves(checkpoint.array_items(state)))


def check_run(config: ConfigDict, objective: Objective, mesh: Mesh, workdir: Path) -> None:
    """Refuses what cannot end well, and logs the page of the run.

    Raises:
      UserError: the state does not fit a device, or a checkpoint the disk.
    """
    state = planned_state(objective, mesh)
    plan, size = memory_plan(state), checkpoint_bytes(state)
    check_memory(plan)
    place = config.checkpoint.folder or workdir
    storage.refuse_full(place, size, "a checkpoint")
    for line in page(config, mesh, state, plan, size, place):
        logger.info(line)


def page(config: ConfigDict, mesh: Mesh, state: TrainState, plan: dict[str, int], size: int,
         place: Any) -> list[str]:
    """The lines that say what runs, on what, and what it will take."""
    device = mesh.devices.flat[0]
    rows = multihost.local_rows(mesh_lib.batch_sharding(mesh), config.data.batch_size)
    shape = " x ".join(f"{axis} {count}" for axis, count in mesh.shape.items())
    parts = ", ".join(f"{name} {bytes_ / GIB:.2f}" for name, bytes_ in plan.items() if bytes_)
    free = storage.free_bytes(place)
    room = "no limit" if free is None else f"{free / GIB:.1f} GiB free"
    return [
        f"run: {config.objective} with {config.model.name}, config "
        f"{hashlib.sha256(to_json(config).encode()).hexdigest()[:12]}, code "
        f"{run_record.code()['code_sha256'][:12]}, jax {jax.__version__}",
        f"mesh: {shape} on {mesh.size} x {device.device_kind}, {jax.process_count()} process(es)",
        f"batch: {config.data.batch_size} pictures an update, {len(rows)} read by this process, "
        f"{config.optim.accumulate} micro-batch(es)",
        f"parameters: {count(state.params):,}; moments and averages: "
        f"{count((state.opt_state, state.ema)):,}; other networks: "
        f"{count((state.companions, state.frozen)):,}",
        f"memory a device, GiB: {parts}; {sum(plan.values()) / GIB:.2f} of "
        f"{device_memory() / GIB:.2f}, activations left out",
        f"checkpoints: {size / GIB:.3f} GiB each, {config.checkpoint.keep} kept, every "
        f"{config.checkpoint.every} steps, {room}",
        f"plan: {config.total_steps} steps, samples every {config.sample.every}, patience "
        f"{config.mesh.patience:g} s, grace {config.checkpoint.grace:g} s"]


def count(tree: Any) -> int:
    """Numbers in a tree of arrays."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
