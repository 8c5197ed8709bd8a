"""Full size: 1.30 to 1.40 billion random numbers there and back, with memory and time measured.

    pytest -m slow tests/tools/test_full_size.py -s

Needs 18 GB of disk (`--basetemp=DIR` chooses where) and minutes a network. Every command runs in
its own process, whose peak resident memory the system reports.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.tools.test_recognise import FAMILY, MODELS, NETWORKS, shapes_of
from tools.convert_torch_weights.readers import open_source
from tools.convert_torch_weights.readers.tensors import LazyTensor
from tools.convert_torch_weights.safetensors_writer import write_safetensors
from tools.convert_torch_weights.torch_writer import write_torch_zip

pytestmark = pytest.mark.slow

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
MEMORY_LIMIT = 1.3  # copies of the weights in the destination's dtype
FULL_SIZE = [name for name in NETWORKS if NETWORKS[name]["net"] != "Discriminator_ImageDiT"]


def write_source(path: Path, name: str, dtype: np.dtype) -> None:
    """A file with the network's names and shapes and random numbers, made tensor by tensor."""
    rng = np.random.default_rng(0)
    tensors = [LazyTensor(f"net.{key}", dtype, shape, lambda shape=shape: np.asarray(
        rng.standard_normal(shape, np.float32)).astype(dtype))
        for key, shape in shapes_of(NETWORKS[name]).items()]
    with open(path, "wb") as file:
        if path.suffix == ".pth":
            write_torch_zip(file, tensors)
        else:
            write_safetensors(file, tensors, {})


def measured(what: str, nbytes: int, *arguments: str) -> float:
    """Runs the command; prints time and peak memory; returns the peak in copies of the weights."""
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "tools.convert_torch_weights", *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    seconds, peak = time.monotonic() - started, usage.ru_maxrss * 1024
    assert os.waitstatus_to_exitcode(status) == 0
    print(f"{what}: {seconds:.0f} s, {nbytes / seconds / 1e6:.0f} MB/s, peak {peak / 1e9:.2f} GB = "
          f"{peak / nbytes:.2f} copies", flush=True)
    return peak / nbytes


def copied(src: Path, dst: Path) -> None:
    """A plain copy of the same file to compare with."""
    started = time.monotonic()
    shutil.copyfile(src, dst)
    os.sync()
    seconds = time.monotonic() - started
    print(f"plain copy: {seconds:.0f} s, {src.stat().st_size / seconds / 1e6:.0f} MB/s", flush=True)
    dst.unlink()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULL_SIZE)
def test_there_and_back(tmp_path, name, dtype):
    ending = ".pth" if dtype == "float32" else ".safetensors"
    src, out, back = tmp_path / f"src{ending}", tmp_path / "out", tmp_path / f"back{ending}"
    write_source(src, name, DTYPES[dtype])
    nbytes = src.stat().st_size
    print(f"\n{name}, {dtype}: {nbytes:,} bytes", flush=True)
    copied(src, tmp_path / "copy")
    model = MODELS[NETWORKS[name]["net"]]
    family = ["--set", f"codec.name={FAMILY.search(name)[0]}"] if model == "pidnet" else []
    peaks = [measured("convert", nbytes, "convert", "--src", str(src), "--dst", str(out),
                      "--model", model, *family),
             measured("verify", nbytes, "verify", str(src), str(out)),
             measured("export", nbytes, "export", str(out), "--dst", str(back),
                      "--prefix", "net.")]
    measured("verify the export", nbytes, "verify", str(back), str(out))
    shutil.rmtree(out)
    assert same_tensors(src, back)
    assert max(peaks) <= MEMORY_LIMIT
    shutil.rmtree(tmp_path)


def same_tensors(first: Path, second: Path) -> bool:
    """Bit for bit, tensor by tensor."""
    ours, theirs = open_source(first).tensors, open_source(second).tensors
    return ours.keys() == theirs.keys() and all(
        np.array_equal(tensor.read().reshape(-1).view(np.uint8),
                       theirs[key].read().reshape(-1).view(np.uint8))
        for key, tensor in ours.items())
