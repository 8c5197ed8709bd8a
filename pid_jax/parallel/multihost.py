"""Several processes as one program: start-up, whose rows are whose, writing once, barriers.

A single process needs none of this: `start` does nothing there and the rest is the identity.
"""

import contextlib
import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from pid_jax.errors import TryAgain, UserError

COORDINATOR, PROCESSES, PROCESS = "PID_JAX_COORDINATOR", "PID_JAX_PROCESSES", "PID_JAX_PROCESS"
# Variables under which a cluster's own launcher tells how many tasks there are; jax then finds
# the coordinator by itself.
CLUSTER_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
CLUSTER_HOSTS = "TPU_WORKER_HOSTNAMES"
START_SECONDS = 300
HEARTBEAT_SECONDS = 30  # of silence after which jax takes a process for dead and ends the others
LEAVE_SECONDS = 30  # that a process which ends waits for the others to end as well


class Share(NamedTuple):
    """The rows of every global batch that a process reads: share `index` of `count` equal ones."""

    index: int
    count: int


def start(environment: Mapping[str, str] = os.environ) -> None:
    """Joins the processes of a run; call it before anything asks for devices.

    `PID_JAX_COORDINATOR=host:port`, `PID_JAX_PROCESSES=n` and `PID_JAX_PROCESS=i` start a run by
    hand. On TPU pods, under Slurm and under Open MPI jax finds these itself. A single process
    starts nothing.
    Raises:
      UserError: only some of the three variables, or values that make no sense.
    """
    by_hand = _by_hand(environment)
    if by_hand is not None:
        if by_hand["num_processes"] > 1:
            refuse_unreachable(by_hand["coordinator_address"], by_hand["process_id"])
            _initialise(**by_hand)
    elif cluster_size(environment) > 1:
        _initialise()


def _initialise(**options: Any) -> None:
    # CPU devices of several processes talk through gloo; other platforms ignore this.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # jax's own service for preemption swallows SIGTERM; `training.interruption` does its work.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(initialization_timeout=START_SECONDS,
                               heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                               shutdown_timeout_seconds=LEAVE_SECONDS, **options)


def refuse_unreachable(address: str, process: int, seconds: float = START_SECONDS) -> None:
    """Waits until the coordinator answers; process 0, which makes it, looks at the address only.

    Raises:
      UserError: no address, or nobody answers there for so many seconds.
    """
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise UserError(f"{COORDINATOR} is {address!r}; expected host:port")
    end = time.monotonic() + seconds
    while process:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(f"the coordinator {address} ({COORDINATOR}) does not answer "
                                f"process {process} ({error}); {_advice(host)}") from error
            time.sleep(0.2)


def _advice(host: str) -> str:
    loopback = "a loopback address reaches the processes of one host only, name process 0's host " \
               "as the others see it"
    return loopback if host.startswith(("127.", "localhost", "[::1]")) else (
        "is process 0 running, and does its port pass the firewall")


@contextlib.contextmanager
def leaving_alone() -> Iterator[None]:
    """Lets a process that fails alone end with its own exit status.

    At the end of a process jax waits `LEAVE_SECONDS` for the others, then aborts all of them. The
    others learn of the failure by that; this one has said why, and ends a little earlier. One that
    lost another waits as well: jax then says which one is missing.
    """
    try:
        yield
    except TryAgain:
        raise
    except Exception as error:
        if jax.distributed.is_initialized():
            timer = threading.Timer(LEAVE_SECONDS - 5, os._exit, (getattr(error, "exit_code", 1),))
            timer.daemon = True
            timer.start()
        raise


def _by_hand(environment: Mapping[str, str]) -> dict[str, Any] | None:
    given = [name for name in (COORDINATOR, PROCESSES, PROCESS) if environment.get(name)]
    if not given:
        return None
    missing = {COORDINATOR, PROCESSES, PROCESS} - set(given)
    if missing:
        raise UserError(f"{', '.join(given)} are set but not {', '.join(sorted(missing))}; "
                        "set all three or none")
    count, index = (_number(environment, name) for name in (PROCESSES, PROCESS))
    if not 0 <= index < count:
        raise UserError(f"{PROCESS} is {index}; expected 0 to {count - 1} ({PROCESSES} is {count})")
    return {"coordinator_address": environment[COORDINATOR], "num_processes": count,
            "process_id": index}


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise UserError(f"{name} is {environment[name]!r}; expected a whole number") from None


def cluster_size(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes the cluster's launcher says there are; 1 when it says nothing."""
    hosts = [host for host in environment.get(CLUSTER_HOSTS, "").split(",") if host]
    tasks = [environment.get(name, "") for name in CLUSTER_SIZES]
    return max([1, len(hosts), *(int(count) for count in tasks if count.isdigit())])


def is_writer() -> bool:
    """Whether this process writes the files that a run writes once."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Returns when every process has come to the barrier of this name."""
    multihost_utils.sync_global_devices(name)


def lost_peer(error: BaseException) -> bool:
    """Whether an exception of a collective says that another process is gone."""
    return jax.process_count() > 1 and re.search(
        "UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|[Gg]loo|NCCL|Connection (closed|reset)|heartbeat|"
        "[Bb]arrier", str(error)) is not None


def lost(when: str, reason: str, last_good: str) -> TryAgain:
    """What to raise for an exception of `lost_peer`."""
    return TryAgain(f"process {jax.process_index()} of {jax.process_count()} lost another process "
                    f"{when} ({reason}); {last_good}")


class Vote:
    """Whether any process has raised its flag, told to all at the same step, without waiting.

    The answer is to the question before: a tiny reduction runs behind each step on the devices.
    """

    def __init__(self, mesh: Mesh):
        """Nothing has been asked; a single process needs no devices for it."""
        self._alone = jax.process_count() == 1
        flat = Mesh(mesh.devices.reshape(-1), ("all",))
        self._places = NamedSharding(flat, jax.sharding.PartitionSpec("all"))
        self._any = jax.jit(jnp.any, out_shardings=NamedSharding(
            flat, jax.sharding.PartitionSpec()))
        self._asked: jax.Array | None = None

    def ask(self, flag: bool) -> bool:
        """Gives this process's flag, in every process at every step.

        Returns:
          Alone: the flag. Else whether any had been raised when this was asked before.
        """
        if self._alone:
            return flag
        before, size = self._asked, self._places.mesh.size
        self._asked = self._any(jax.make_array_from_callback(
            (size,), self._places, lambda _: np.array([flag])))
        return before is not None and bool(before)


def gather(values: Mapping[str, float]) -> dict[str, list[float]]:
    """Every process's values, in the order of the processes; all of them must ask."""
    mine = np.array(list(values.values()), np.float64)
    if jax.process_count() == 1:
        return {name: [float(value)] for name, value in values.items()}
    # float32 is what devices carry here: seconds and bytes need no more.
    table = np.asarray(multihost_utils.process_allgather(mine.astype(np.float32)))
    return {name: [float(value) for value in column] for name, column in zip(values, table.T)}


def in_any(flag: bool) -> bool:
    """Whether `flag` is true in any process; all of them must ask."""
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


@contextlib.contextmanager
def together(kind: type[UserError]) -> Iterator[None]:
    """Makes an error of this kind in one process an error in all of them; all must come here."""
    error = None
    try:
        yield
    except kind as found:
        error = found
    if jax.process_count() > 1 and in_any(error is not None) and error is None:
        raise kind("another process of this run met an error, which its log names")
    if error is not None:
        raise error


def refuse_difference(text: str, what: str) -> None:
    """Raises UserError in every process when `text` is not the same in all of them."""
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    if np.any(multihost_utils.process_allgather(digest) != digest):
        raise UserError(f"{what} differs between the processes of this run; start all of them "
                        "with the same command")


def local_rows(sharding: NamedSharding, batch: int) -> list[int]:
    """Rows of a global batch that the devices of this process hold, ascending.

    From the sharding and not from the process index: when `sequence` spans processes, several
    processes need the same rows.
    """
    slices = sharding.addressable_devices_indices_map((batch,)).values()
    return sorted({row for index in slices for row in range(*index[0].indices(batch))})


def batch_share(sharding: NamedSharding, batch: int) -> Share:
    """The equal share of every global batch that this process reads.

    Raises:
      UserError: the mesh gives this process rows that are no such share.
    """
    rows = local_rows(sharding, batch)
    size, first = len(rows), rows[0]
    if rows != list(range(first, first + size)) or batch % size or first % size:
        raise UserError(f"this mesh gives process {jax.process_index()} the rows {rows} of a batch "
                        f"of {batch}, which are no equal share; choose mesh sizes so that each "
                        "process holds whole neighbouring rows")
    return Share(first // size, batch // size)


def global_array(local: np.ndarray, sharding: NamedSharding, share: Share) -> jax.Array:
    """The global array whose leading axis the processes hold in shares.

    Args:
      local: this process's rows.
      sharding: of the result; its leading axis must be divided as `share` was derived.
    """
    shape = (len(local) * share.count, *local.shape[1:])
    first = len(local) * share.index

    def piece(index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(shape[0])
        return local[(slice(start - first, stop - first), *index[1:])]

    return jax.make_array_from_callback(shape, sharding, piece)


def to_host(tree: Any, mesh: Mesh) -> Any:
    """Every leaf whole, as numpy, in every process; all processes must call it."""
    whole = NamedSharding(mesh, jax.sharding.PartitionSpec())
    gathered = jax.jit(lambda leaves: leaves, out_shardings=whole)(tree)
    return jax.tree.map(np.asarray, gathered)
