"""The line that a start of a run leaves."""

import json

import pytest

from pid_jax.config import base_config
from pid_jax.errors import UserError
from pid_jax.parallel.mesh import single_device
from pid_jax.training import run_record, workdir


def test_each_start_is_recorded_with_its_changes(tmp_path):
    config = base_config()
    run_record.append(tmp_path, config, single_device(), 0, ["pid_jax.main", "--config=a.py"])
    workdir.write_config(tmp_path, config)
    config.optim.lr, config.log.every = 3e-4, 7
    run_record.append(tmp_path, config, single_device(), 12, ["pid_jax.main"])
    first, second = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    assert first["command"] == ["pid_jax.main", "--config=a.py"] and first["changed"] == []
    assert second["step"] == 12
    assert second["changed"] == ["config.log.every: 10 -> 7", "config.optim.lr: 0.0001 -> 0.0003"]
    assert len(first["code_sha256"]) == 64 and first["packages"]["jax"]
    assert first["mesh"] == {"data": 1, "fsdp": 1, "sequence": 1}


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"\xff", b"[" * 100_000])
def test_a_garbled_config_is_a_sentence(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match="config.json, the config of the start before, cannot be"):
        run_record.changes(tmp_path, base_config())
