"""Starts children, waits for what they log, hurts them, and compares what they leave."""

import multiprocessing
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pid_jax.parallel import multihost
from pid_jax.training import checkpoint
from pid_jax.training import metrics as metrics_lib
from tests import tiny
from tests.faults import child

HANG = 60.0  # seconds that nothing may take
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.faults.child"])


class Run:
    """A run in one folder, started as often as it takes."""

    def __init__(self, folder: Path, data: Path, **options: Any):
        """Nothing starts yet.

        Args:
          options: those of every start; see `child.main`.
        """
        self.folder, self._data, self._options = folder, data, options
        self._begin = 0

    def log(self, process: int = 0) -> str:
        """What was printed since the last start."""
        path = Path(f"{self.folder}.{process}.log")
        return path.read_text()[self._begin:] if path.exists() else ""

    def start(self, **options: Any) -> multiprocessing.Process:
        """A process that runs; several may be started for several hosts."""
        path = Path(f"{self.folder}.0.log")
        self._begin = path.stat().st_size if path.exists() else 0
        process = PROCESSES.Process(target=child.main, args=(str(self.folder), str(self._data)),
                                    kwargs=self._options | options)
        process.start()
        return process

    def wait_for(self, text: str, process: multiprocessing.Process) -> bool:
        """Whether the log said this before the process ended."""
        end = time.monotonic() + HANG
        while not re.search(text, self.log()):
            assert time.monotonic() < end, f"{text!r} did not come: {self.log()}"
            if process.exitcode is not None:
                return False
            time.sleep(0.005)
        return True

    def finish(self, **options: Any) -> tuple[int, str]:
        """Runs to the end: exit status and output."""
        return self.end_of(self.start(**options))

    def end_of(self, process: multiprocessing.Process) -> tuple[int, str]:
        """Waits for the end, which may not take longer than `HANG`."""
        process.join(HANG)
        hangs = process.exitcode is None
        if hangs:
            process.kill()
            process.join()
        assert not hangs, f"hangs: {self.log()}"
        return process.exitcode, self.log()

    @property
    def checkpoints(self) -> Path:
        """Where they are."""
        return Path(self._options.get("checkpoint__folder", self.folder)) / "checkpoints"

    def steps(self) -> list[int]:
        """The complete checkpoints."""
        if not self.checkpoints.is_dir():
            return []
        return sorted(int(path.name) for path in self.checkpoints.iterdir() if path.name.isdigit())

    def outcome(self) -> dict[str, Any]:
        """All arrays of the last checkpoint and all metrics: what must not depend on faults."""
        folder = self.checkpoints / str(self.steps()[-1])
        arrays = {name: jax.device_get(checkpoint.restore_tree(
            folder, name, checkpoint.placed(checkpoint.saved_shapes(folder, name), None)))
            for name in ("params", "ema", "optimizer")}
        lines = metrics_lib.read(self.folder / metrics_lib.FILE)
        return arrays | {"metrics": [{name: value for name, value in line.items()
                                      if name != "time"} for line in lines]}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit."""
    assert found["metrics"] == expected["metrics"]
    for name in ("params", "ema", "optimizer"):
        jax.tree.map(np.testing.assert_array_equal, found[name], expected[name])


def hosts(run: Run, count: int, **options: Any) -> list[multiprocessing.Process]:
    """Starts the processes of one run of several hosts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for index in range(count):
        Path(f"{run.folder}.{index}.log").unlink(missing_ok=True)
    return [run.start(environment={
        multihost.COORDINATOR: f"127.0.0.1:{port}", multihost.PROCESSES: str(count),
        multihost.PROCESS: str(index)}, **options) for index in range(count)]


def finish_hosts(run: Run, count: int, **options: Any) -> None:
    """Runs so many hosts to the end."""
    processes = hosts(run, count, **options)
    for process in processes:
        process.join(HANG)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * count, "".join(map(run.log, range(count)))


def children_of(pid: int) -> list[int]:
    """Processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found


def corrupt_a_record(data: Path, copy: Path) -> str:
    """A data set whose one picture is no picture; returns its key."""
    from pid_jax.data.dataset import DatasetWriter
    from pid_jax.data.records import Record
    tiny.write_dataset(copy, count=11)
    with DatasetWriter(copy) as writer:
        writer.add(Record(key="broken", source="ramps", width=tiny.SIZE, height=tiny.SIZE,
                          captions={"prompt": "broken", "label": "0"}, image=b"no picture"))
    return "broken"


def kill(process: multiprocessing.Process) -> None:
    """SIGKILL, as by the platform or the kernel."""
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def note(line: str, path: str | None = os.environ.get("FAULT_TABLE")) -> None:
    """Prints a row of the table of outcomes, and adds it to the file that FAULT_TABLE names."""
    line = re.sub(r"/\S*/", ".../", line)  # folders of this machine
    print(line)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def sentence(log: str) -> str:
    """The line of a log that explains the end."""
    lines = [line for line in log.splitlines() if line.startswith("error: ")]
    assert lines, log
    return lines[-1]
