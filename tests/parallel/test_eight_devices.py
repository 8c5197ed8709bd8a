"""Runs the modules in `eight_devices/`, each in its own process with eight fake CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "eight_devices"
REPOSITORY = FOLDER.parents[2]
SECONDS = 1800
# Compiling is most of the work; the numbers do not depend on how hard LLVM tries.
FLAGS = ("--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
         "--xla_llvm_disable_expensive_passes=true")


@pytest.mark.parametrize("module", sorted(p.name for p in FOLDER.glob("test_*.py")))
def test_module(module: str) -> None:
    run(module, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["test_training_step.py", "test_elastic.py"])
def test_slow_steps(module: str) -> None:
    run(module, "slow")


def run(module: str, marker: str) -> None:
    environment = dict(os.environ, JAX_PLATFORMS="cpu", PID_JAX_EIGHT_DEVICES="1",
                       XLA_FLAGS=FLAGS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker,
         str(FOLDER / module)],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
