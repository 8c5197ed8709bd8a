"""Mesh shapes from the config, and the refusals."""

import jax
import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.parallel import mesh as mesh_lib


def sizes(data=-1, fsdp=1, sequence=1):
    return {"data": data, "fsdp": fsdp, "sequence": sequence}


def test_open_axis_takes_what_is_left():
    assert mesh_lib.resolve_sizes(sizes(fsdp=2), 8) == {"data": 4, "fsdp": 2, "sequence": 1}


def test_smaller_mesh_than_devices_is_allowed():
    assert mesh_lib.resolve_sizes(sizes(1), 8) == {"data": 1, "fsdp": 1, "sequence": 1}


@pytest.mark.parametrize("shape, sentence", [
    (sizes(4, 4), "needs 16 devices; there are 8"),
    (sizes(fsdp=3), "leaves 3 devices to divide 8"),
    (sizes(-1, -1), "leave one axis open"),
    (sizes(0), "config.mesh.data is 0"),
])
def test_wrong_sizes(shape, sentence):
    with pytest.raises(UserError, match=sentence):
        mesh_lib.resolve_sizes(shape, 8)


def test_batch_must_divide():
    with pytest.raises(UserError, match="batch_size is 8; .* asks for a multiple of 16"):
        mesh_lib.check_batch({"data": 4, "fsdp": 2, "sequence": 1}, 8, 2)


def test_shard_batch_keeps_values():
    mesh = mesh_lib.make_mesh(sizes(1), 2, devices=jax.devices()[:1])
    placed = mesh_lib.shard_batch({"image": np.arange(6.0).reshape(2, 3)}, mesh)
    np.testing.assert_array_equal(placed["image"], np.arange(6.0).reshape(2, 3))
