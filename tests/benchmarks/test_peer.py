"""The peer of `benchmarks.peer` is the same network: against golden numbers and ours.

    PID_TORCH_PYTHON=PATH pytest -m slow tests/benchmarks

PATH is an interpreter with torch (the extra `convert`); it may live in an environment of its own.
"""

import os
import sys

import jax
import numpy as np
import pytest

from benchmarks import peer
from pid_jax import models
from tests import drawing, tiny
from tests.golden.cases import collect
from tools.convert_torch_weights.mappings import jax_to_torch, table_for, torch_to_jax

pytestmark = pytest.mark.slow
PYTHON = os.environ.get("PID_TORCH_PYTHON", sys.executable)
OPTIONS = {name: value for name, value in tiny.NETWORK.items() if name in peer.MID_SIZE}
TEXT = 3


@pytest.fixture
def start(tmp_path):
    """Starts a peer with options and parameters; all end with the test."""
    peers = []

    def open_peer(options, params):
        peers.append(peer.Peer(PYTHON, tmp_path, options, params, threads=1))
        return peers[-1]

    yield open_peer
    for one in peers:
        one.close()


def golden_cases():
    """The text-to-image cases without options that the mid-size network does not use."""
    for case in collect():
        config = case.meta.get("config", {})
        if (case.meta.get("net") == "PixDiT_T2I" and set(case.inputs) >= {"x", "t", "y"}
                and "mask" not in case.inputs and config["rope_mode"] == "original"
                and not case.meta["call_kwargs"] and not config.get("enable_ed")
                and config["use_text_rope"] and "forward" in case.tolerance):
            yield pytest.param(case, id=case.name)


@pytest.mark.parametrize("case", list(golden_cases()))
def test_peer_equals_the_reference(case, start):
    options = {name: case.meta["config"][name] for name in peer.MID_SIZE}
    params = torch_to_jax(table_for(peer.MODEL, options), case.params())
    torch = start(options, params)
    batch = torch.add_batch("batch", {
        name: case.inputs[name].transpose(0, 2, 3, 1) if name == "x" else case.inputs[name]
        for name in ("x", "t", "y")})
    np.testing.assert_allclose(torch.result("forward", "eager", batch)["result"],
                               case.outputs["x"], **case.tolerance["forward"])


def test_peer_equals_ours_with_its_gradients_and_sampler(start):
    net = models.build_model(peer.MODEL, **OPTIONS)
    params = drawing.random_like(jax.eval_shape(
        lambda: models.init_parameters(net, jax.random.key(0))), 0)
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    batch = {"x": draw(2, 16, 24, 3), "t": np.float32([100, 700]), "table": peer.sampler_table(),
             "y": draw(2, TEXT, OPTIONS["txt_embed_dim"]), "target": draw(2, 16, 24, 3)}
    torch, functions = start(OPTIONS, params), peer.functions_of(net)
    name = torch.add_batch("batch", batch)
    for run in ("forward", "sampler"):
        ours = peer.nchw(jax.jit(functions[run])(params, batch))
        np.testing.assert_allclose(torch.result(run, "eager", name)["result"], ours, atol=2e-5)
    grads = jax_to_torch(table_for(peer.MODEL, OPTIONS),
                         jax.jit(functions["gradients"])(params, batch))
    theirs = torch.result("gradients", "eager", name)
    for key, expected in grads.items():
        found = theirs.get(key, np.zeros_like(expected))  # nothing reads the last block's text
        np.testing.assert_allclose(found, expected, atol=1e-6 + 1e-4 * np.abs(expected).max(),
                                   err_msg=key)
