"""Local kernels against dense attention in float32, forward and backward."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.models.attention import SAVED_ATTENTION, softmax_attention
from pid_jax.parallel import kernels

XLA_CUDNN = functools.partial(kernels.cudnn, implementation="xla")
SPLASH = functools.partial(kernels.splash, interpret=True)
CPU, TPU, GPU = (SimpleNamespace(platform=p) for p in ("cpu", "tpu", "cuda"))


def draw(queries: int, keys: int, width: int = 8, dtype=jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(queries + keys)
    return [jnp.asarray(rng.standard_normal((2, n, 3, width)), dtype)
            for n in (queries, keys, keys)]


def gradients(kernel, arrays, key_mask):
    loss = lambda *a: jnp.square(kernel(*a, key_mask) - 0.5).sum()
    return kernel(*arrays, key_mask), jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kernel, queries, keys", [
    (functools.partial(kernels.chunked, chunk=4), 12, 12),
    (functools.partial(kernels.chunked, chunk=5), 13, 7),
    (functools.partial(kernels.chunked, chunk=64), 9, 9),
    (XLA_CUDNN, 13, 13), (XLA_CUDNN, 12, 7), (SPLASH, 130, 257)])
def test_kernel_equals_dense(kernel, queries, keys, masked):
    arrays = draw(queries, keys)
    key_mask = None
    if masked:
        key_mask = jnp.asarray(np.random.default_rng(1).random((2, keys)) < 0.5).at[0].set(False)
    actual = gradients(kernel, arrays, key_mask)
    expected = gradients(softmax_attention, arrays, key_mask)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=3e-6 * np.abs(e).max() + 1e-9)


def test_chunked_sums_key_gradients_in_float32():
    arrays = draw(2048, 16, dtype=jnp.bfloat16)
    loss = lambda kernel: lambda *a: kernel(*a).astype(jnp.float32).sum()
    chunked = jax.grad(loss(functools.partial(kernels.chunked, chunk=8)), 2)(*arrays)
    dense = jax.grad(loss(softmax_attention), 2)(*arrays)
    np.testing.assert_allclose(chunked.astype(jnp.float32), dense.astype(jnp.float32), rtol=0.02)


@pytest.mark.parametrize("length, block", [
    (65536, 1024), (65836, 1024), (16684, 512), (1024, 1024), (1324, 128), (128, 128), (5, 128)])
def test_splash_block(length, block):
    assert kernels.splash_block(length) == block


def test_splash_names_what_the_backward_pass_needs():
    arrays = draw(128, 128)
    names = str(jax.make_jaxpr(jax.grad(lambda *a: SPLASH(*a).sum()))(*arrays))
    assert names.count(f"name={SAVED_ATTENTION}") == 2  # output and log-sum-exp


def test_auto_chooses_by_platform(monkeypatch):
    chosen = []
    for name in ("splash", "cudnn", "chunked", "softmax_attention"):
        monkeypatch.setattr(kernels, name, lambda *a, name=name: chosen.append(name))
    half, single = draw(600, 600, dtype=jnp.bfloat16), draw(600, 600)
    for device, arrays in ((TPU, half), (TPU, draw(64, 64)), (GPU, half), (GPU, single),
                           (CPU, half)):
        kernels.local_kernel("auto", device)(*arrays)
    monkeypatch.setattr(kernels, "DENSE_SCORES", 100)
    kernels.local_kernel("auto", CPU)(*single)
    assert chosen == ["splash", "softmax_attention", "cudnn", "softmax_attention",
                      "softmax_attention", "chunked"]


def test_wrong_kernels_are_refused():
    with pytest.raises(UserError, match="'flash' is unknown"):
        kernels.local_kernel("flash", CPU)
    with pytest.raises(UserError, match="'splash' runs on tpu only; the devices are cpu"):
        kernels.local_kernel("splash", CPU)
    with pytest.raises(UserError, match="bfloat16 or float16, not float32"):
        kernels.local_kernel("cudnn", GPU)(*draw(4, 4))
    with pytest.raises(UserError, match="not 12"):
        kernels.cudnn(*draw(4, 4, 12, jnp.bfloat16))
