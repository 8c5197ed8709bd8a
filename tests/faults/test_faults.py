"""The fault campaign: whatever happens to a run, it resumes rightly or stops with a sentence.

    python -m pytest tests/faults -m "slow or not slow"      the whole, some minutes
    FAULT_TABLE=table.md ...                                 also writes the rows of docs/pods.md

The short form is part of the normal tests. The children are `child.py`: the real loop, data,
checkpoints and restore around one chaotic parameter in the place of a network.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pid_jax.training import checkpoint
from tests import tiny
from tests.faults import lab
from tests.faults.lab import Run, assert_same, note, sentence

TOTAL = 12
OPTIONS = {"total_steps": TOTAL, "checkpoint__every": 2, "data__batch_size": 4}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.write_dataset(tmp_path_factory.mktemp("data") / "packed")


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    """What a run leaves that nothing disturbed."""
    run = Run(tmp_path_factory.mktemp("expected") / "run", data, **OPTIONS)
    code, log = run.finish()
    assert code == 0, log
    return run.outcome()


@pytest.fixture
def run(tmp_path, data):
    return Run(tmp_path / "run", data, **OPTIONS)


PHASES = {"step": (r"step \d+/", 0.05), "save": (r"saving the checkpoint of step [48]", 0.05),
          "restore": (r"resuming from", 0.2)}  # what to wait for, and a random time after it


def killed(run: Run, phase: str, rng: random.Random) -> bool:
    """Starts, waits for the phase and kills; False when the run was over before."""
    marker, most = PHASES[phase]
    process = run.start(pause=0.02)
    if not run.wait_for(marker, process):
        process.join()
        return False
    time.sleep(rng.uniform(0, most))
    lab.kill(process)
    return True


@pytest.mark.parametrize("kills", [3, pytest.param(54, marks=pytest.mark.slow)])
def test_sigkill_at_random_moments(tmp_path, data, expected, kills):
    rng, done, turn = random.Random(kills), {name: 0 for name in PHASES}, 0
    while sum(done.values()) < kills:
        run, turn = Run(tmp_path / str(turn), data, **OPTIONS), turn + 1
        for _ in range(6):  # kills of one run, then it may finish
            committed = run.steps()
            phase = min(done, key=lambda name: (name == "restore" and not committed, done[name]))
            if sum(done.values()) < kills and killed(run, phase, rng):
                done[phase] += 1
            newest = sorted({*committed, *run.steps()})[-3:]  # which the run keeps
            assert set(newest) <= set(run.steps()), (committed, run.steps())
        code, log = run.finish()
        assert code == 0, log
        assert_same(run.outcome(), expected)
    note(f"| SIGKILL, {', '.join(f'{n} in {name}' for name, n in done.items())} | {turn} runs, all "
         "ended bit-equal to an undisturbed one; no committed checkpoint was lost |")


def test_sigterm_saves_and_the_same_command_goes_on(run, expected):
    process = run.start(pause=0.1)
    assert run.wait_for("step 3/", process)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    code, log = run.end_of(process)
    waited, step = time.monotonic() - began, run.steps()[-1]
    assert code == 143 and "stopped by SIGTERM at step" in sentence(log)
    assert run.finish()[0] == 0
    assert_same(run.outcome(), expected)
    note(f"| SIGTERM in a step | status 143 after {waited:.1f} s with step {step} saved; went on, "
         "bit-equal |")


def test_a_save_that_takes_longer_than_the_grace_ends_all_the_same(run):
    process = run.start(pause=30.0, checkpoint__grace=0.5)
    assert run.wait_for("starting from scratch", process)
    while not (run.folder / "metrics.jsonl").exists():
        time.sleep(0.05)
    time.sleep(1)
    os.kill(process.pid, signal.SIGTERM)
    code, log = run.end_of(process)
    assert code == 143 and "(config.checkpoint.grace)" in sentence(log), log
    note("| SIGTERM, and the step does not end | status 143 after `checkpoint.grace` |")


DAMAGES = {
    "a file truncated": lambda folder: _largest(folder).write_bytes(b"\x00" * 10),
    "a bit flipped": lambda folder: _flip(_largest(folder)),
    "index deleted": lambda folder: (folder / "params" / "_METADATA").unlink()
    if (folder / "params" / "_METADATA").exists() else shutil.rmtree(folder / "params"),
    "manifest deleted": lambda folder: (folder / "ema" / "manifest.ocdbt").unlink(),
    "card emptied": lambda folder: (folder / "card" / "metadata").write_text(""),
}


def _largest(folder: Path) -> Path:
    return max((path for path in (folder / "params").rglob("*") if path.is_file()),
               key=lambda path: path.stat().st_size)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("what", [
    name if name == "a bit flipped" else pytest.param(name, marks=pytest.mark.slow)
    for name in DAMAGES])
def test_a_damaged_checkpoint_is_left_for_the_one_before(run, expected, what):
    assert run.finish(total_steps=8)[0] == 0
    DAMAGES[what](run.checkpoints / "8")
    code, log = run.finish()
    assert code == 0, log
    assert "DAMAGED CHECKPOINT of step 8" in log and "GOING BACK to step 6" in log
    assert any(path.name.startswith("damaged-8-") for path in run.checkpoints.iterdir())
    assert_same(run.outcome(), expected)
    note(f"| newest checkpoint: {what} | said so, kept as `damaged-8-...`, went on from step 6, "
         "bit-equal |")


def test_all_damaged_is_a_sentence(run):
    assert run.finish(total_steps=4)[0] == 0
    for step in run.steps():
        (run.checkpoints / str(step) / "card" / "metadata").write_text("")
    code, log = run.finish()
    assert code == 2 and "all 2 checkpoints" in sentence(log)
    note(f"| all checkpoints damaged | status 2: {sentence(log)[:60]}... |")


def test_disk_without_room_for_the_file(run, expected):
    code, log = run.finish(fault="small_files")
    assert code == 1 and "there is no complete checkpoint" in sentence(log)
    assert run.steps() == []
    assert run.finish()[0] == 0
    assert_same(run.outcome(), expected)
    note("| a file reaches RLIMIT_FSIZE while a checkpoint is written | status 1 with the last "
         "good step; afterwards the same command, bit-equal |")


@pytest.mark.slow
def test_full_disk(tmp_path, data, expected):
    """A tmpfs that holds five checkpoints; needs the right to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk])
    assert mounted.returncode == 0, "mounting a tmpfs needs root"
    try:
        run = Run(tmp_path / "run", data, **OPTIONS, checkpoint__folder=str(disk))
        code, log = run.finish(checkpoint__keep=99)
        steps = run.steps()
        assert code == 1 and steps, log
        assert f"newest complete checkpoint is of step {steps[-1]}" in sentence(log)
        code, log = run.finish(checkpoint__keep=99)
        assert code == 2 and "make room" in sentence(log) and run.steps() == steps
        for step in steps[:2]:
            shutil.rmtree(run.checkpoints / str(step))
        code, log = run.finish()
        assert code == 0 and f"resuming from {run.checkpoints / str(steps[-1])}" in log, log
        assert_same(run.outcome(), expected)
        note(f"| tmpfs of 4 MiB full after step {steps[-1]} | status 1 with that step; the next "
             "start: status 2; with room for a checkpoint the same command, bit-equal |")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_storage_that_vanishes(run, expected):
    code, log = run.finish(fault="vanishing_storage", total_steps=8)
    assert code == 1 and "newest complete checkpoint is of step 4" in sentence(log)
    said = sentence(log)
    run.checkpoints.unlink()
    (run.folder / "elsewhere").rename(run.checkpoints)
    code, log = run.finish()
    assert code == 0 and "resuming from" in log, log
    assert_same(run.outcome(), expected)
    note(f"| checkpoint folder vanishes | status 1: ...{said[-60:]}; back again the same command, "
         "bit-equal |")


@pytest.mark.slow
def test_read_only_folder(tmp_path, data):
    folder = tmp_path / "run"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs", folder], check=True)
    try:
        code, log = Run(folder, data, **OPTIONS).finish()
        assert code == 2 and "cannot be written to" in sentence(log)
        note(f"| read-only workdir | status 2: {sentence(log)[:70]}... |")
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_clock_that_jumps(run, expected):
    codes = []
    while not codes or codes[-1] == 75:  # a jump during a save looks like one that hangs
        code, log = run.finish(fault="jumping_clock", pause=0.05)
        codes.append(code)
        assert code in (0, 75) and len(codes) < 3, log
    assert_same(run.outcome(), expected)
    note(f"| wall clock jumps by hours | statuses {codes}, bit-equal |")


@pytest.mark.slow
def test_data_worker_that_dies(run, expected):
    process = run.start(pause=0.2, data__workers=1)
    assert run.wait_for("step 3/", process)
    for worker in lab.children_of(process.pid):
        os.kill(worker, signal.SIGKILL)
    code, log = run.end_of(process)
    assert code == 75 and "a data worker died at the batch of step" in sentence(log), log
    assert run.finish(data__workers=1)[0] == 0
    assert_same(run.outcome(), expected)
    note(f"| data worker killed | status {code}; the same command, bit-equal |")


def test_slow_reader_is_named(run):
    code, log = run.finish(fault="slow_reader", total_steps=2)
    assert code == 0 and "for the batch of the 0 data threads, which begins with 'picture-" in log


def test_corrupt_record_mid_epoch(tmp_path, data):
    broken = lab.corrupt_a_record(data, tmp_path / "data")
    run = Run(tmp_path / "run", tmp_path / "data", **OPTIONS)
    code, log = run.finish()
    assert code == 0 and f"picture '{broken}' is replaced by another" in log
    strict = Run(tmp_path / "strict", tmp_path / "data", **OPTIONS, data__strict=True)
    code, log = strict.finish()
    assert code == 2, log
    note(f"| corrupt record | replaced, with a warning that names it; with `data.strict` status 2: "
         f"{sentence(log)[:60]}... |")


EIGHT = {"mesh__data": 2, "mesh__fsdp": 4, "data__batch_size": 8, "total_steps": 4}


def test_two_hosts_of_four_devices_save_and_restore(tmp_path, data):
    """Bit-equal to themselves, interrupted or not; to one host as far as sums in another order."""
    whole, again, alone = (Run(tmp_path / name, data, **OPTIONS | EIGHT)
                           for name in ("whole", "again", "alone"))
    lab.finish_hosts(whole, 2, devices=4)
    lab.finish_hosts(again, 2, devices=4, total_steps=2)
    lab.finish_hosts(again, 2, devices=4)
    assert f"resuming from {again.checkpoints / '2'}" in again.log()
    assert_same(again.outcome(), whole.outcome())
    code, log = alone.finish(devices=8)
    assert code == 0, log
    for line, wanted in zip(whole.outcome()["metrics"], alone.outcome()["metrics"], strict=True):
        assert line["batch"] == wanted["batch"]
        assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    note("| 2 hosts of 4 devices, stopped and started again | bit-equal to 2 hosts that were not, "
         "losses equal to 1 host's of 8 devices to 1e-5 |")


HOSTS = {"total_steps": 400, "mesh__data": 2, "pause": 0.1, "mesh__patience": 20.0}


@pytest.mark.slow
@pytest.mark.parametrize("victim, patience", [(0, 20.0), (1, 20.0), (1, 1800.0)])
def test_one_of_two_hosts_killed(run, victim, patience):
    processes = lab.hosts(run, 2, **HOSTS | {"mesh__patience": patience})
    assert run.wait_for("step 3/", processes[0]), run.log() + run.log(1)
    began = time.monotonic()
    lab.kill(processes[victim])
    survivor = processes[1 - victim]
    survivor.join(lab.HANG)
    waited, code = time.monotonic() - began, survivor.exitcode
    log = run.log(1 - victim)
    survivor.kill()
    assert code in (75, -signal.SIGABRT), log
    said = re.search(r"error: process \d of 2|Task \d heartbeat timeout|the leader task was", log,
                     re.IGNORECASE)
    assert said, log
    if patience > lab.HANG:  # jax has had the time to find out who is missing
        assert re.search(rf"task.?{victim}\b", log, re.IGNORECASE), log
    note(f"| host {victim} of 2 killed, patience {patience:g} s | the other ended after "
         f"{waited:.0f} s with status {code if code > 0 else 128 - code}: \"{said[0]} ...\" |")


@pytest.mark.slow
def test_one_of_two_hosts_killed_while_they_restore(run):
    lab.finish_hosts(run, 2, **HOSTS | {"total_steps": 4, "pause": 0.0})
    committed, held = run.steps(), sorted(run.checkpoints.iterdir())
    processes = lab.hosts(run, 2, **HOSTS)
    assert run.wait_for("resuming from", processes[0]), run.log() + run.log(1)
    lab.kill(processes[1])
    processes[0].join(lab.HANG)
    code, log = processes[0].exitcode, run.log()
    processes[0].kill()
    assert code in (75, -signal.SIGABRT), log
    assert "lost another process" in sentence(log), log
    assert run.steps() == committed and sorted(run.checkpoints.iterdir()) == held
    note(f"| host 1 of 2 killed while they restore | the other ended with status "
         f"{code if code > 0 else 128 - code}; no checkpoint was taken for damaged |")


@pytest.mark.slow
def test_sigterm_to_one_of_two_hosts_and_on_alone(run, data, tmp_path, expected):
    processes = lab.hosts(run, 2, **HOSTS)
    assert run.wait_for("step 3/", processes[0]), run.log() + run.log(1)
    os.kill(processes[1].pid, signal.SIGTERM)
    for process in processes:
        process.join(lab.HANG)
    assert [process.exitcode for process in processes] == [143, 143], run.log()
    step = run.steps()[-1]
    found = checkpoint.read_json(run.checkpoints / str(step), "data")
    assert found["step"] == step
    code, log = run.finish(total_steps=step + 2, mesh__data=1)
    assert code == 0, log
    note(f"| SIGTERM to one of 2 hosts | both saved step {step} and ended with 143; one process "
         "went on |")
