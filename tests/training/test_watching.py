"""Ends to waiting, stacks, profiles on request, and where the time of the steps goes."""

import signal
import time

import jax.numpy as jnp
import pytest

from pid_jax.parallel import patience as patience_lib
from pid_jax.training import interruption, performance, profiling


def wait_until(true, seconds=10.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_signal_has_an_end(monkeypatch):
    ended = []
    monkeypatch.setattr(interruption, "end_process", lambda *words: ended.append(words))
    waiting = interruption.Interruption(grace=0.05)
    waiting.notice(signal.SIGTERM)
    wait_until(lambda: ended)
    (sentence, code), = ended
    assert code == 143 and "SIGTERM came 0.05 s ago (config.checkpoint.grace)" in sentence


def test_a_run_that_ends_in_time_is_left_alone(monkeypatch):
    ended = []
    monkeypatch.setattr(interruption, "end_process", lambda *words: ended.append(words))
    waiting = interruption.Interruption(grace=0.2)
    waiting.notice(signal.SIGTERM)
    waiting.over()
    time.sleep(0.4)
    assert not ended


def test_one_process_that_hangs_shows_its_stacks_once_and_goes_on(monkeypatch, caplog):
    dumped = []
    monkeypatch.setattr(patience_lib.faulthandler, "dump_traceback",
                        lambda **_: dumped.append(time.monotonic()))
    with caplog.at_level("WARNING", logger="pid_jax"), patience_lib.patience(0.1) as waiting:
        waiting.note("step 7")
        wait_until(lambda: caplog.records)
        time.sleep(0.2)
        assert len(dumped) == 1
    assert ("has been at step 7 for 0.1 s (config.mesh.patience); its stacks are above"
            in caplog.text)


def test_a_file_asks_for_a_profile(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(profiling.jax.profiler, "start_trace", lambda _: calls.append("start"))
    monkeypatch.setattr(profiling.jax.profiler, "stop_trace", lambda: calls.append("stop"))
    monkeypatch.setattr(profiling, "LOOK_EVERY", 0.0)
    state = jnp.zeros(1)
    with profiling.Profiler(tmp_path, ()) as profiler:
        profiler.before(1, state)
        (tmp_path / "profile.now").touch()
        for step in range(2, 8):
            profiler.before(step, state)
            assert calls == (["start"] if step < 5 else ["start", "stop"]), step
    assert not (tmp_path / "profile.now").exists()


def test_performance_of_the_steps():
    measured = performance.Performance(batch=8, devices=4, peak=400e12)
    measured.add(1.0, 0.25)
    measured.add(3.0, 0.75)
    values = measured.report(flops=200e12)
    assert values["step_seconds"] == [1.0, 3.0] and values["step_data_wait"] == [0.25, 0.75]
    assert values["images_per_second"] == 4.0 and values["hosts"]["data_wait"] == [0.5]
    assert values["tflops_per_device"] == 25.0 and values["mfu"] == 0.25
    assert "mfu" not in measured.report(flops=0)


@pytest.mark.parametrize("waits, text", [
    ([0.1, 0.15], ""), ([0.1, 0.9], " | slowest process 1: waits 0.90 s a step for its data, the "
                                    "quickest 0.10")])
def test_the_process_that_keeps_the_others_waiting_is_named(waits, text):
    hosts = {"seconds": [2.0, 2.0], "data_wait": waits, "peak_gib": [0.0, 0.0]}
    assert performance.remark({"hosts": hosts}) == text
    assert performance.remark({"hosts": hosts | {"peak_gib": [1.0, 3.0]}}).startswith(
        " | peak 3.0 GiB")
