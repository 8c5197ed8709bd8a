"""Sharding rules: which axis is divided, what stays whole, what is refused."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from pid_jax.errors import UserError
from pid_jax.parallel import sharding

MESH = AbstractMesh((2, 4, 1), ("data", "fsdp", "sequence"))


def specs(mesh=MESH, **shapes):
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return {name: place.spec for name, place in sharding.state_shardings(tree, mesh).items()}


def test_longer_matrix_axis_is_divided_and_stacks_stay_whole():
    assert specs(kernel=(8, 256, 512)) == {"kernel": PartitionSpec(None, None, "fsdp")}


def test_other_axis_when_the_longer_one_does_not_divide():
    assert specs(kernel=(256, 513)) == {"kernel": PartitionSpec("fsdp", None)}


@pytest.mark.parametrize("shape, spec", [
    ((8, 256, 512), (None, "sequence", "fsdp")), ((512, 256), ("fsdp", "sequence")),
    ((257, 512), (None, ("fsdp", "sequence"))), ((512, 260), (("fsdp", "sequence"), None)),
    ((260, 516), (None, "fsdp")), ((257, 520), (None, "fsdp"))])
def test_sequence_divides_parameters_too(shape, spec):
    mesh = AbstractMesh((1, 4, 8), ("data", "fsdp", "sequence"))
    assert specs(mesh, kernel=shape) == {"kernel": PartitionSpec(*spec)}


def test_small_and_unsplittable_leaves_are_whole():
    assert set(specs(bias=(4096,), scale=(4096,)).values()) == {PartitionSpec()}
    assert specs(kernel=(16, 16)) == {"kernel": PartitionSpec()}
    assert specs(kernel=(257, 513)) == {"kernel": PartitionSpec()}


def test_moments_and_averages_follow_their_parameter():
    leaf = jax.ShapeDtypeStruct((256, 512), jnp.float32)
    tree = {"params": {"kernel": leaf}, "opt_state": ({"mu": {"kernel": leaf}},),
            "ema": {"ema": {"kernel": leaf}}}
    places = jax.tree.leaves(sharding.state_shardings(tree, MESH))
    assert len({place.spec for place in places}) == 1


def test_unknown_leaf_is_refused_by_name():
    with pytest.raises(UserError, match="no sharding rule matches mystery"):
        specs(mystery=(3,))
