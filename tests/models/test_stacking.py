"""Stacked blocks against a plain loop: groups, injections, taps, early exit, remat."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.models.stacking import Injection, run_blocks, stacked_init

DEPTH, WIDTH = 5, 3


def block_init(key):
    return {"kernel": jax.random.normal(key, (WIDTH, WIDTH)) / 2}


def block(params, x):
    return x + jnp.tanh(x @ params["kernel"])


def gate(params, x, extra):
    return x * params + extra


@pytest.fixture
def params():
    return stacked_init(block_init, DEPTH)(jax.random.key(0))


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(1), (2, WIDTH))


def injection(interval):
    count = -(-DEPTH // interval)
    keys = jax.random.split(jax.random.key(2))
    return Injection(interval, jax.random.normal(keys[0], (count, WIDTH)),
                     jax.random.normal(keys[1], (count, 2, WIDTH)), gate)


def plain_loop(params, x, depth=DEPTH, inject=None):
    """The stream after every block."""
    streams = []
    for i in range(depth):
        if inject and i % inject.interval == 0:
            g = i // inject.interval
            x = inject.apply(inject.params[g], x, inject.inputs[g])
        x = block({"kernel": params["kernel"][i]}, x)
        streams.append(x)
    return streams


def test_initial_values_differ_between_blocks(params):
    assert params["kernel"].shape == (DEPTH, WIDTH, WIDTH)
    assert len(np.unique(params["kernel"])) == params["kernel"].size


@pytest.mark.parametrize("unroll", [1, 2, 4, 9])
@pytest.mark.parametrize("interval", [None, 1, 2, 3, 5, 7])
@pytest.mark.parametrize("depth", [DEPTH, 3])
def test_scan_equals_a_loop(params, x, interval, depth, unroll):
    inject = injection(interval) if interval else None
    expected = plain_loop(params, x, depth, inject)
    taps = (0, depth - 1, 1)
    result = run_blocks(block, params, x, depth=depth, taps=taps, injection=inject, collect=True,
                        unroll=unroll)
    np.testing.assert_allclose(result.stream, expected[-1], atol=1e-6)
    np.testing.assert_allclose(result.collected, jnp.stack(expected), atol=1e-6)
    for tap, found in zip(taps, result.taps, strict=True):
        np.testing.assert_allclose(found, expected[tap], atol=1e-6)


@pytest.mark.parametrize("unroll", [1, 4])
@pytest.mark.parametrize("remat", ["none", "full", "attention"])
def test_gradients_equal_those_of_a_loop(params, x, remat, unroll):
    inject = injection(2)

    def loss(params, x, inputs, run):
        stream, tap = run(params, x, inject._replace(inputs=inputs))
        return jnp.sum(stream**2) + jnp.sum(tap**3)

    def scanned(params, x, inject):
        result = run_blocks(block, params, x, taps=(2,), injection=inject, remat=remat,
                            unroll=unroll)
        return result.stream, result.taps[0]

    def looped(params, x, inject):
        streams = plain_loop(params, x, inject=inject)
        return streams[-1], streams[2]

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    found, expected = (gradient(params, x, inject.inputs, run) for run in (scanned, looped))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found,
                 expected)


def test_unrolled_blocks_are_recomputed_all_the_same():
    # Without a loop XLA would merge what is recomputed with the forward pass.
    params = stacked_init(lambda key: jax.random.normal(key, (64, 64)), 4)(jax.random.key(0))
    x = jnp.ones((4096, 64))

    def deep(params, x):
        for _ in range(4):
            x = jnp.tanh(x @ params)
        return x

    def temporaries(remat):
        loss = lambda params, x: run_blocks(deep, params, x, remat=remat, unroll=4).stream.sum()
        return jax.jit(jax.grad(loss)).lower(params, x).compile().memory_analysis(
            ).temp_size_in_bytes

    assert temporaries("full") < 0.75 * temporaries("none")
