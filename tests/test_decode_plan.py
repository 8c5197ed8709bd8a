import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pid_jax import decode_plan
from pid_jax.models.quantised import quantise, stored_bytes
from pid_jax.parallel.mesh import AXES
from pid_jax.parallel.sharding import bytes_per_device


@pytest.mark.parametrize("kind", ["stored", "int8", "fp8"])
def test_the_plan_counts_the_weights_that_will_be_held(decoder, pid_checkpoint, kind):
    held = decoder.checkpoint.params
    held = held if kind == "stored" else quantise(held, kind)
    planned = decode_plan.unloaded(pid_checkpoint, weights=kind).checkpoint
    assert planned.kept_as == kind
    assert bytes_per_device(planned.params) == stored_bytes(held)
    form = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    assert form(planned.params) == form(held)


def test_a_divided_kernel_stays_divided_in_8_bits():
    """Along the axis that a scale sums up, it is whole; along the other one it is divided."""
    mesh = AbstractMesh((1, 1, 4), AXES)

    def held(*spec: str | None) -> int:
        place = NamedSharding(mesh, P(*spec))
        kernel = jax.ShapeDtypeStruct((2, 8, 16), np.float32, sharding=place)
        params = {"patch_blocks": {"attn": {"proj_x": {"kernel": kernel}}}}
        return bytes_per_device(decode_plan.described(params, "int8"))

    values, scales = 2 * 8 * 16, 4 * 2 * 16
    assert held() == values + scales
    assert held(None, "sequence") == values // 4 + scales
    assert held(None, None, "sequence") == (values + scales) // 4
