"""A run saved on eight devices goes on on 1, 2, 4 and on other axes, with the same batches."""

import shutil

import jax
import numpy as np
import pytest

from pid_jax import objectives, train
from pid_jax.parallel import mesh as mesh_lib
from pid_jax.training import checkpoint, restore
from pid_jax.training import metrics as metrics_lib
from tests import tiny
from tests.faults import child

SAVED_AT, TOTAL = 2, 4
BATCH = 8
RELATIVE = 1e-5  # of losses and gradient norms: sums over devices in another order
WHOLE = (2, 4, 1), [(1, 1, 1), (2, 1, 1), (1, 4, 1), (4, 2, 1)]
WITH_SEQUENCE = (2, 2, 2), [(1, 1, 1), (1, 2, 1), (2, 1, 2), (1, 2, 4)]


def config(data, mesh, total):
    result = tiny.config("pixeldit_t2i", data)
    result.total_steps, result.data.batch_size = total, BATCH
    result.mesh.data, result.mesh.fsdp, result.mesh.sequence = mesh
    return result


@pytest.fixture(params=["chaos", pytest.param("network", marks=pytest.mark.slow)])
def meshes(request, monkeypatch):
    """The mesh that saves and those that go on, of one chaotic parameter or of a real network."""
    if request.param == "network":
        return WITH_SEQUENCE
    monkeypatch.setattr(objectives, "build",
                        lambda config, mesh=None: child.Chaos(config, 64, pause=0.0))
    monkeypatch.setattr(train, "Sampler", child.NoSampler)
    return WHOLE


def lines(workdir):
    return metrics_lib.read(workdir / metrics_lib.FILE)


def numbers(line):
    return {name: value for name, value in line.items()
            if not isinstance(value, str) and name != "time"}


def restored(workdir, data, mesh):
    """The state that a run on this mesh begins with, on the host."""
    options = config(data, mesh, TOTAL)
    made = mesh_lib.make_mesh(options.mesh, BATCH)
    checkpointer = checkpoint.Checkpointer(workdir, 9)
    state, position = restore.initial_state(options, objectives.build(options, made), made,
                                            checkpointer)
    checkpointer.close()
    assert len(jax.tree.leaves(state.params)[0].sharding.device_set) == np.prod(mesh)
    return jax.device_get(checkpoint.array_items(state)), position


def test_saved_on_eight_devices_it_goes_on_on_others(tmp_path, meshes):
    saving, others = meshes
    data = tiny.write_dataset(tmp_path / "data", count=24)
    train.run(config(data, saving, TOTAL), str(tmp_path / "whole"))
    train.run(config(data, saving, SAVED_AT), str(tmp_path / "saved"))
    expected, position = restored(tmp_path / "saved", data, saving)
    for mesh in others:
        workdir = shutil.copytree(tmp_path / "saved", tmp_path / "x".join(map(str, mesh)))
        found, there = restored(workdir, data, mesh)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert there == position
        train.run(config(data, mesh, TOTAL), str(workdir))
        assert [line["batch"] for line in lines(workdir)] == [
            line["batch"] for line in lines(tmp_path / "whole")]
        for line, wanted in zip(lines(workdir), lines(tmp_path / "whole"), strict=True):
            assert numbers(line) == pytest.approx(numbers(wanted), rel=RELATIVE), mesh
