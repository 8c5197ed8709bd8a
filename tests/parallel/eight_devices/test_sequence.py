"""Sequence-parallel attention equals one device: outputs and every gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from pid_jax.errors import UserError
from pid_jax.models.attention import dense_attention
from pid_jax.parallel import kernels, sequence

AXES = ("data", "fsdp", "sequence")
RELATIVE = 1e-6
SPLASH_RELATIVE = 5e-6  # flash-like kernels sum in another order than the dense reference
GRIDS = {"square": (8, 8), "wide": (4, 10)}  # ways 2, 4 and 8 divide both


def mesh_of(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:int(np.prod(shape))]).reshape(shape), AXES)


def draw(batch: int, tokens: int, heads: int, width: int, text: int) -> list[jax.Array]:
    """q, k, v and, when there is text, its q, k, v."""
    rng = np.random.default_rng(tokens + heads + text)
    lengths = [tokens] * 3 + [text] * 3 * bool(text)
    return [jnp.asarray(rng.standard_normal((batch, n, heads, width)), jnp.float32)
            for n in lengths]


def outputs_and_gradients(attention, arrays, key_mask=None):
    """(loss, outputs), gradients of the squared distance to a target that differs everywhere."""

    def loss(*arrays):
        image, text = attention(*arrays, key_mask=key_mask)
        parts = [x for x in (image, text) if x is not None]
        target = lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape)
        errors = [x - target(x) for x in parts]
        # A product sums in blocks; a plain float32 sum of thousands is itself 1e-6 off.
        return sum(jnp.einsum("bqhd,bqhd->", e, e) for e in errors), parts

    return jax.jit(jax.value_and_grad(loss, range(len(arrays)), has_aux=True))(*arrays)


def assert_equal(actual, expected, relative: float) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a), np.asarray(e)
        np.testing.assert_allclose(a, e, rtol=0, atol=relative * max(1e-3, np.abs(e).max()))


def compare(attention, batch, tokens, heads, text, masked, width=8, relative=RELATIVE):
    arrays = draw(batch, tokens, heads, width, text)
    key_mask = None
    if masked:
        key_mask = np.random.default_rng(0).random((batch, tokens + text)) < 0.6
        key_mask[0] = False
        key_mask[-1] = True
        key_mask = jnp.asarray(key_mask)
    expected = outputs_and_gradients(dense_attention, arrays, key_mask)
    assert_equal(outputs_and_gradients(attention, arrays, key_mask), expected, relative)


# Joint lengths that no degree divides; the mask changes sides so that each meets each design.
@pytest.mark.parametrize("grid, text, masked", [
    ("square", 7, False), ("wide", 9, True), ("square", 0, True), ("wide", 0, False)],
    ids=["joint-square", "joint-wide-masked", "pixel-square-masked", "pixel-wide"])
@pytest.mark.parametrize("design, heads, ways", [
    ("ulysses", 8, 2), ("ulysses", 8, 4), ("ulysses", 8, 8), ("allgather", 3, 2),
    ("allgather", 3, 4), ("allgather", 3, 8), ("ulysses_allgather", 3, 2),
    ("ulysses_allgather", 6, 4), ("ulysses_allgather", 12, 8)])
def test_design_equals_one_device(design, heads, ways, grid, text, masked):
    rows, columns = GRIDS[grid]
    attention = sequence.make_attention(mesh_of(1, 8 // ways, ways), "dense", design)
    compare(attention, 8 // ways, rows * columns, heads, text, masked)


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
def test_chunked_under_any_mesh(shape):
    local = functools.partial(kernels.chunked, chunk=7)
    compare(sequence.make_attention(mesh_of(*shape), local), 8, 40, 8, 5, masked=True)


@pytest.mark.parametrize("design, heads, width, masked", [
    ("ulysses", 4, 64, False), ("ulysses_allgather", 2, 72, True)])
def test_splash_interpreted(design, heads, width, masked):
    local = functools.partial(kernels.splash, interpret=True)
    attention = sequence.make_attention(mesh_of(1, 2, 4), local, design)
    compare(attention, 2, 260, heads, 9, masked, width, SPLASH_RELATIVE)


def test_wrong_meshes_are_refused():
    arrays = draw(2, 30, 6, 8, 0)
    with pytest.raises(UserError, match="30 image tokens .* sequence 4"):
        sequence.make_attention(mesh_of(1, 2, 4))(*arrays)
    with pytest.raises(UserError, match="batch of 2 .* data 8"):
        sequence.make_attention(mesh_of(8, 1, 1))(*arrays)
    with pytest.raises(UserError, match="does not divide 6 heads"):
        sequence.make_attention(mesh_of(1, 1, 4), design="ulysses")(*draw(1, 32, 6, 8, 0))
    with pytest.raises(UserError, match="'spiral' is unknown"):
        sequence.make_attention(mesh_of(1, 1, 4), design="spiral")
