"""The report of a compiled program: sums, the table, JSON, and running out of memory."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from pid_jax.ahead_of_time import report as report_lib
from pid_jax.ahead_of_time.fit import one_line
from pid_jax.ahead_of_time.report import Report
from pid_jax.ahead_of_time.topology import GENERATIONS, GIB, Topology
from pid_jax.flops import Flops
from pid_jax.parallel.sharding import bytes_per_device

MESH = {"data": 1, "fsdp": 4, "sequence": 4}


def example(**changes) -> Report:
    fields = dict(
        topology="v5e:4x4", devices=16, device_kind="TPU v5 lite", program="train", mesh=MESH,
        height=2048, width=2048, batch=4, remat="full", flops=Flops(50e12, 80e12),
        limit=15.75 * GIB, arguments={"parameters": GIB, "batch": GIB // 4}, fits=True,
        temporaries=2 * GIB, collectives={"all-gather": GIB}, collective_calls={"all-gather": 3},
        cycles=1_500_000_000, copy_cycles=1_000_000, kernels={"splash_mha_fwd": 16})
    return Report(**fields | changes)


def test_total_table_and_json():
    found = example()
    assert found.total == 3.25 * GIB
    text = report_lib.table(found)
    for part in ("mesh data 1 x fsdp 4 x sequence 4", "3.25 GiB of 15.75", "attention 62%",
                 "1.00 GiB in 3 calls", "16 calls, not counted"):
        assert part in text
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["flops"] == {"matmul": 50e12, "attention": 80e12}
    assert plain["seconds"] is None and plain["total"] == found.total


def test_rough_seconds_adds_kernels_cycles_and_wire():
    machine = Topology("v5e:4x4", GENERATIONS["v5e"], ())
    attention = 80e12 * (4 / 3) / (197e12 * 0.4 * 16)
    assert report_lib.rough_seconds(example(), machine) == pytest.approx(
        attention + 1.0 + GIB / 2e11)
    kept = report_lib.rough_seconds(example(remat="attention"), machine)
    assert kept == pytest.approx(attention * 3 / 4 + 1.0 + GIB / 2e11)


def test_out_of_memory_is_a_result_and_other_errors_are_errors():
    message = ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
               "(256.00G) exceeds available HBM (15.75G).\nmore")
    assert "exceeds available HBM (15.75G)" in report_lib.out_of_memory(RuntimeError(message))
    with pytest.raises(RuntimeError, match="INTERNAL"):
        report_lib.out_of_memory(RuntimeError("INTERNAL: broken"))
    refused = dataclasses.replace(example(), fits=False, refusal="exceeds available HBM")
    assert "does not fit: exceeds available HBM" in one_line(refused)
    assert "does not fit" in report_lib.table(refused)


def test_bytes_per_device():
    sharding = NamedSharding(AbstractMesh((1, 4, 4), tuple(MESH)), PartitionSpec("fsdp", None))
    leaf = jax.ShapeDtypeStruct((8, 10), jnp.bfloat16, sharding=sharding)
    assert bytes_per_device({"a": leaf, "b": leaf}) == 2 * 2 * 10 * 2
