"""Start-up rules, and a rehearsal: two processes of four devices against one of eight."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image

from pid_jax.errors import UserError
from pid_jax.parallel import multihost
from tests import drawing, tiny

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]
SECONDS = 900
QUICK = "--xla_backend_optimization_level=0"  # most of the time is compilation


@pytest.mark.parametrize("environment, size", [
    ({}, 1), ({"SLURM_NTASKS": "4"}, 4), ({"SLURM_NTASKS": "1"}, 1),
    ({"TPU_WORKER_HOSTNAMES": "a,b,c,d"}, 4), ({"TPU_WORKER_HOSTNAMES": "localhost"}, 1),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, 2)])
def test_cluster_size(environment, size):
    assert multihost.cluster_size(environment) == size


@pytest.mark.parametrize("environment, message", [
    ({"PID_JAX_PROCESSES": "2"}, "PID_JAX_PROCESSES are set but not PID_JAX_COORDINATOR"),
    ({"PID_JAX_COORDINATOR": "h:1", "PID_JAX_PROCESSES": "2", "PID_JAX_PROCESS": "2"},
     "PID_JAX_PROCESS is 2; expected 0 to 1"),
    ({"PID_JAX_COORDINATOR": "h:1", "PID_JAX_PROCESSES": "two", "PID_JAX_PROCESS": "0"},
     "PID_JAX_PROCESSES is 'two'; expected a whole number")])
def test_half_a_start_is_refused(environment, message):
    with pytest.raises(UserError, match=message):
        multihost.start(environment)


def test_one_process_starts_nothing():
    multihost.start({})
    multihost.start({"PID_JAX_COORDINATOR": "h:1", "PID_JAX_PROCESSES": "1",
                     "PID_JAX_PROCESS": "0"})
    assert multihost.is_writer()
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "sequence"))
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    assert multihost.batch_share(sharding, 6) == multihost.Share(0, 1)
    local = np.arange(12.0).reshape(6, 2)
    np.testing.assert_array_equal(multihost.global_array(local, sharding, multihost.Share(0, 1)),
                                  local)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(command: list[str], processes: int, devices: int) -> list[subprocess.Popen]:
    """Starts a command in so many processes that share `devices`."""
    environment = dict(
        os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(REPOSITORY),
        XLA_FLAGS=f"--xla_force_host_platform_device_count={devices // processes} {QUICK}",
        PID_JAX_PROCESSES=str(processes), PID_JAX_COORDINATOR=f"127.0.0.1:{free_port()}")
    return [subprocess.Popen([sys.executable, *command], text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, cwd=REPOSITORY,
                             env=environment | {"PID_JAX_PROCESS": str(index)})
            for index in range(processes)]


def together(command: list[str], processes: int, devices: int) -> list[str]:
    """Runs a command in processes to its end; what each one printed."""
    running = launch(command, processes, devices)
    try:
        results = [process.communicate(timeout=SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    assert all(process.returncode == 0 for process in running), results
    return [out for out, _ in results]


def rehearse(processes: int) -> list[dict]:
    """What the script saw in so many processes of eight devices together."""
    printed = together([str(FOLDER / "rehearsal.py")], processes, 8)
    return [json.loads(out.splitlines()[-1]) for out in printed]


def test_two_processes_equal_one():
    (alone,), both = rehearse(1), rehearse(2)
    assert [found["writer"] for found in both] == [True, False]
    assert [found["devices"] for found in both] == [8, 8]
    assert "config differs between the processes" in both[0]["refused"] == both[1]["refused"]
    assert [found["(1, 2, 4)"]["rows"] for found in both] == [[0, 1], [2, 3]]
    assert [found["(1, 1, 8)"]["rows"] for found in both] == [[0, 1, 2, 3]] * 2
    for shape in ("(1, 2, 4)", "(1, 1, 8)", "(2, 2, 2)"):
        for found in both:
            assert found[shape]["loss"] == pytest.approx(alone[shape]["loss"], rel=1e-6)
            assert found[shape]["gradient"] == pytest.approx(alone[shape]["gradient"], rel=1e-6)


def test_waiting_for_a_process_that_does_not_come_has_an_end():
    first, second = launch([str(FOLDER / "waiting.py")], 2, 2)
    try:
        next(line for line in second.stdout if line == "waiting\n")
        for _ in range(2):  # a second signal ends at once, even inside a collective
            time.sleep(0.5)
            second.send_signal(signal.SIGTERM)
        assert "error: SIGTERM came twice" in second.communicate(timeout=60)[1]
        assert second.returncode == 143
        error = first.communicate(timeout=60)[1]
        assert "process 0 of 2 has been at step 7 for 3 s" in error
        assert "most recent call first" in error and "waiting.py" in error  # its stacks
        assert first.returncode == 75
    finally:
        for process in (first, second):
            process.kill()


CONFIG = """
from pathlib import Path
from tests import tiny

def get_config():
    return tiny.config({objective!r}, Path({data!r}))
"""


def metrics(folder: Path) -> list[dict[str, float]]:
    """Loss, gradient norm and what else a run noted of every step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if isinstance(value, float)
             and name != "time"} for line in lines]


def scores(folder: Path) -> dict[str, float]:
    """What the pictures of the last step scored, where there is a truth."""
    note = json.loads((folder / "samples" / "step_0000002.json").read_text())
    return {name: value for name, value in note.items() if name.startswith("psnr")}


@pytest.mark.parametrize("objective", [
    pytest.param("pid_teacher", marks=pytest.mark.slow), "pixeldit_t2i"])
def test_training_is_the_same_on_one_device_on_eight_and_in_two_processes(tmp_path, objective):
    data = tiny.write_dataset(tmp_path / "data")
    file = tmp_path / "config.py"
    file.write_text(CONFIG.format(objective=objective, data=str(data)))
    found = {}
    for name, processes, devices, mesh in (("one", 1, 1, (1, 1, 1)), ("eight", 1, 8, (2, 2, 2)),
                                           ("processes", 2, 8, (1, 2, 4))):
        sizes = [f"--config.mesh.{axis}={n}" for axis, n in zip(("data", "fsdp", "sequence"), mesh)]
        together(["-m", "pid_jax.main", f"--config={file}", f"--workdir={tmp_path / name}",
                  "--config.total_steps=2", *sizes], processes, devices)
        found[name] = metrics(tmp_path / name), scores(tmp_path / name)
    steps, pictures = found["one"]
    assert len(steps) == 2
    for name in ("eight", "processes"):
        assert found[name][0] == [pytest.approx(step, rel=1e-5) for step in steps], name
        assert found[name][1] == pytest.approx(pictures, rel=1e-4), name


def test_decoding_is_the_same_on_one_device_on_eight_and_in_two_processes(tmp_path, pid_checkpoint):
    drawing.write_photo(tmp_path / "small.png", 16, 32)
    found = {}
    for name, processes, devices in (("one", 1, 1), ("eight", 1, 8), ("processes", 2, 8)):
        together(["-m", "pid_jax.decode", "--checkpoint", str(pid_checkpoint), "--steps", "1",
                  "--input", str(tmp_path / "small.png"), "--out", str(tmp_path / name),
                  "--sequence", str(devices)], processes, devices)
        picture, = (tmp_path / name).rglob("sigma_0.000.png")
        found[name] = np.asarray(Image.open(picture), int)
    assert found["one"].shape == (32, 64, 3) and found["one"].std() > 5
    for name in ("eight", "processes"):
        assert np.abs(found[name] - found["one"]).max() <= 1, name
