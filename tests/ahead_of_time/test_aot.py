"""The command, on TPU topologies that are not here; what compiles at full size is marked slow."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pid_jax.ahead_of_time import topology
from pid_jax.errors import UserError

REPOSITORY = Path(__file__).parents[2]
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None,
                                  reason="libtpu is not installed (pip install libtpu)")

SMALL = ("data.image_size=256", "sample.image_size=256", "data.batch_size=2",
         "model.hidden_size=256", "model.num_groups=4", "model.patch_depth=2",
         "model.pixel_depth=1", "model.pixel_attn_hidden_size=288", "model.pixel_num_groups=4")


def report(tmp_path: Path, *arguments: str, seconds: int = 1200) -> dict:
    """Runs the command in its own process and returns the first report."""
    file = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "pid_jax.parallel.aot", f"--json={file}", *arguments],
        cwd=REPOSITORY, env=dict(os.environ, JAX_PLATFORMS="cpu"), capture_output=True, text=True,
        timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())[0]


@needs_libtpu
def test_one_block_compiles_for_tpu():
    # In its own process: libtpu stays with the process that loaded it.
    done = subprocess.run([sys.executable, "-m", "tests.ahead_of_time.one_block"], cwd=REPOSITORY,
                          capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == "TPU v5 lite"
    assert {"all-to-all", "all-gather"} <= found["collectives"].keys()
    kernels = {name.split("_")[2]: calls for name, calls in found["kernels"].items()}
    assert kernels == {"fwd": 1, "dq": 1, "dkv": 1}
    assert found["cycles"] > 0 and found["unknown_loops"] == 0


@needs_libtpu
@pytest.mark.slow
def test_small_training_step_compiles_for_tpu(tmp_path):
    found = report(tmp_path, "--config=configs/pixeldit_t2i_2k.py:offline", "--topology=v5e:2x2",
                   "--mesh=1x2x2", *(f"--config.{change}" for change in SMALL))
    assert found["fits"] and found["device_kind"] == "TPU v5 lite"
    # Two joint blocks, whose forward kernels the backward pass runs once more; the pixel block's 256
    # tokens attend densely.
    kernels = {name.split("_")[2]: calls for name, calls in found["kernels"].items()}
    assert kernels == {"fwd": 4, "dq": 2, "dkv": 2}
    assert found["flops"]["attention"] > 0 and found["cycles"] > 0
    assert found["unknown_loops"] == 0


@pytest.mark.parametrize("name", ["v5litepod:8x8", "v5e", "v5e:", "v5e:8by8"])
def test_unknown_topologies_are_refused(name):
    with pytest.raises(UserError, match="is unknown; expected <generation>:<shape>"):
        topology.open_topology(name)


# Arguments plus temporaries of the prototype in spec/jax.md, GiB per chip.
FULL_SIZE = [("v5e:4x4", "1x4x4", 2048, 4, 3.4), ("v5e:4x4", "1x4x4", 4096, 4, 9.0),
             ("v5e:8x8", "1x8x8", 4096, 8, 4.4), ("v5p:2x2x4", "1x4x4", 4096, 4, 9.1),
             ("v6e:8x8", "1x8x8", 4096, 8, 3.4)]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("machine, mesh, size, batch, gib", FULL_SIZE)
def test_full_training_step_fits(tmp_path, machine, mesh, size, batch, gib):
    found = report(tmp_path, "--config=configs/pixeldit_t2i_2k.py:offline",
                   f"--topology={machine}", f"--mesh={mesh}", f"--config.data.batch_size={batch}",
                   f"--config.data.image_size={size}", seconds=3600)
    arguments = sum(found["arguments"].values())
    assert found["fits"]
    assert (arguments + found["temporaries"]) / 2**30 <= gib


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("machine, mesh, size", [
    ("v5e:1", "1x1x1", 2048), ("v5e:2x2", "1x1x4", 2048), ("v5e:1", "1x1x1", 4096),
    ("v5e:2x2", "1x1x4", 4096)])
def test_full_size_decode_fits(tmp_path, machine, mesh, size):
    found = report(tmp_path, "--config=configs/pid_teacher_flux_2k.py:offline",
                   "--program=sample", f"--topology={machine}", f"--mesh={mesh}",
                   "--config.data.batch_size=1", f"--config.data.image_size={size}",
                   "--config.param_dtype=bfloat16", seconds=3600)
    assert found["fits"]
