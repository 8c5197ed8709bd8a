"""PyTorch itself opens what `export` writes, and its own files of every form are read bit by bit.

    PID_TORCH_PYTHON=PATH pytest -m slow tests/tools/test_torch_interop.py

PATH is an interpreter with torch (the extra `convert`); it may live in an environment of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.tools import forge
from tests.tools.test_convert import NETWORKS, request, state_dict
from tools.convert_torch_weights.convert import convert
from tools.convert_torch_weights.export import export
from tools.convert_torch_weights.readers import open_source
from tools.convert_torch_weights.readers.tensors import TORCH_DTYPES

pytestmark = pytest.mark.slow
SIDE = Path(__file__).with_name("torch_side.py")
FILES = ("zip", "legacy", "protocol_4", "views", "views_legacy", "module", "parameters",
         "training_run", "no_checksums")


def torch_side(*arguments) -> None:
    interpreter = os.environ.get("PID_TORCH_PYTHON", sys.executable)
    done = subprocess.run([interpreter, str(SIDE), *map(str, arguments)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Files that torch wrote."""
    folder = tmp_path_factory.mktemp("torch")
    torch_side("write", folder)
    return folder


def assert_read(source, folder: Path) -> None:
    index = json.loads((folder / "raw" / "index.json").read_text())
    assert source.tensors.keys() == index.keys()
    for name, (dtype, shape) in index.items():
        value = source.tensors[name].read()
        assert (value.dtype, list(value.shape)) == (TORCH_DTYPES[dtype], shape), name
        assert np.asarray(value, order="C").tobytes() == (folder / "raw" / name).read_bytes(), name


@pytest.mark.parametrize("name", FILES)
def test_files_that_torch_writes(written, name):
    assert_read(open_source(written / name / "file.pth"), written / name)


@pytest.mark.parametrize("ranks", [1, 3])
def test_distributed_checkpoints_of_several_processes(written, ranks):
    source = open_source(written / f"distributed_{ranks}" / "model")
    assert len(source.files) == 1 + ranks
    assert_read(source, written / f"distributed_{ranks}")


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_opens_an_export(tmp_path, network, dtype):
    src = forge.save(tmp_path / "src.safetensors", state_dict(network))
    convert(request(tmp_path, network, src, dtype=dtype))
    export(tmp_path / "out", tmp_path / "back.pth", "net.")
    kind = TORCH_DTYPES[dtype]
    (tmp_path / "raw").mkdir()
    for key, value in state_dict(network).items():
        (tmp_path / "raw" / f"net.{key}").write_bytes(value.astype(kind).tobytes())
    (tmp_path / "raw" / "index.json").write_text(json.dumps({
        f"net.{key}": [dtype, list(value.shape)] for key, value in state_dict(network).items()}))
    torch_side("check", tmp_path / "back.pth", tmp_path)
