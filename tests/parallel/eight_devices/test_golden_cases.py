"""The reference's own numbers, with tokens and batch divided over eight devices."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from pid_jax.models import build_model
from pid_jax.parallel import sequence
from tests.golden import cases, networks, pid_networks, pid_updates


def divided(shape: tuple[int, int, int], design: str):
    """`build_model` for networks that run on a mesh."""
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "fsdp", "sequence"))
    return functools.partial(build_model, constrain=sequence.make_constrain(mesh), pit_chunks=2,
                             attention=sequence.make_attention(mesh, "dense", design))


# Two heads at least: ulysses alone goes up to two devices here, "auto" gathers over the rest.
@pytest.mark.parametrize("name, shape, design, check", [
    ("A04", (1, 2, 4), "auto", pid_networks.check_compiled),
    ("A05", (2, 1, 4), "allgather", pid_networks.check_compiled),
    ("F04", (1, 1, 8), "auto", pid_updates.check_teacher_updates)])
def test_case(monkeypatch, name, shape, design, check):
    for module in (networks, pid_networks):
        monkeypatch.setattr(module, "build_model", divided(shape, design))
    case, = [case for case in cases.collect() if re.match(f"{name}_", case.name)]
    check(case)
