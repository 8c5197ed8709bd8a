"""The loop with stand-ins for the network, and whole runs in their own processes."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax import train
from pid_jax.errors import RunFailed, RunInterrupted, UserError
from pid_jax.parallel.patience import Patience
from pid_jax.training import checkpoint
from pid_jax.training import metrics as metrics_lib
from pid_jax.training.interruption import Interruption
from pid_jax.training.profiling import Profiler
from pid_jax.training.state import TrainState
from tests import tiny

# The loop, without a network.


class Batches:
    """Batches that know their step."""

    def __init__(self, step=0):
        self.step = step

    def __next__(self):
        self.step += 1
        return {}

    @property
    def global_keys(self):
        return [f"sample {self.step}"]

    def get_state(self):
        return {"step": self.step}


class Nothing:
    """An objective and a sampler that do nothing."""

    def __init__(self):
        self.sampled = []

    def phases(self):
        return {"train": one_step}

    def phase(self, step):
        return "train"

    def prepare(self, batch):
        return {}

    def write(self, state):
        self.sampled.append(int(state.step))
        return {}


def start(step=0):
    params = {"kernel": jnp.zeros(2)}
    return TrainState(step=jnp.int32(step), params=params,
                      opt_state={"count": jnp.int32(0)}, ema={})


def one_step(state, batch, loss=1.0):
    state = state.replace(step=state.step + 1, params={"kernel": state.params["kernel"] + 1})
    return state, {"loss": jnp.float32(loss), "grad_norm": 1.0, "learning_rate": 0.1,
                   "update_skipped": 0.0}


def make_loop(folder, monkeypatch, step_function=one_step, step=0, total=6, signal_at=None):
    config = tiny.config("pixeldit_t2i", folder)
    config.total_steps, config.sample.every = total, 4
    interruption = Interruption()

    def observed(state, batch):
        if int(state.step) + 1 == signal_at:
            interruption.signal = signal.SIGTERM
        return step_function(state, batch)

    monkeypatch.setattr(train, "compile_step", lambda *_: observed)
    return train.Loop(
        config=config, objective=Nothing(), mesh=train.mesh_lib.make_mesh(config.mesh, 4),
        batches=Batches(step), checkpointer=checkpoint.Checkpointer(folder, 5),
        writer=metrics_lib.MetricsWriter(folder, step, tensorboard=False), sampler=Nothing(),
        progress=metrics_lib.Progress(step, total, 4),
        profiler=Profiler(folder, ()), interruption=interruption, waiting=Patience())


def test_hooks_happen_when_due_and_at_the_end(tmp_path, monkeypatch):
    loop = make_loop(tmp_path, monkeypatch, total=5)
    assert int(loop.run(start()).step) == 5
    loop.checkpointer.close()
    assert loop.sampler.sampled == [4, 5]
    assert sorted(p.name for p in loop.checkpointer.folder.iterdir()) == ["2", "4", "5"]
    lines = metrics_lib.read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[2]["batch"] == metrics_lib.digest(["sample 3"])


def test_checkpoint_knows_the_next_batch(tmp_path, monkeypatch):
    loop = make_loop(tmp_path, monkeypatch, total=4)
    loop.run(start())
    loop.checkpointer.close()
    assert checkpoint.read_json(loop.checkpointer.folder / "2", "data") == {"step": 2}


def test_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    def breaks(state, batch):
        return one_step(state, batch, loss=np.nan if int(state.step) == 4 else 1.0)

    loop = make_loop(tmp_path, monkeypatch, breaks)
    with pytest.raises(RunFailed, match="loss is nan at step 5; the last good checkpoint is of "
                                        "step 4"):
        loop.run(start())
    loop.checkpointer.close()
    assert loop.checkpointer.latest_step() == 4
    assert metrics_lib.read(tmp_path / "metrics.jsonl")[-1] == {
        **metrics_lib.read(tmp_path / "metrics.jsonl")[-1], "step": 5, "loss": "nan"}


def test_no_broken_state_is_saved(tmp_path, monkeypatch):
    def breaks(state, batch):
        return one_step(state, batch, loss=np.inf if int(state.step) == 1 else 1.0)

    loop = make_loop(tmp_path, monkeypatch, breaks)
    with pytest.raises(RunFailed, match="loss is inf at step 2; there is no checkpoint"):
        loop.run(start())
    loop.checkpointer.close()
    assert loop.checkpointer.latest_step() is None


def test_spike_is_skipped_and_said(tmp_path, monkeypatch, caplog):
    def spikes(state, batch):
        new, values = one_step(state, batch)
        skipped = int(state.step) == 2
        return new, values | {"update_skipped": float(skipped), "grad_norm": 90.0 if skipped else 1}

    loop = make_loop(tmp_path, monkeypatch, spikes)
    with caplog.at_level("WARNING", logger="pid_jax"):
        loop.run(start())
    loop.checkpointer.close()
    assert "step 3: gradient norm 90.0, the update is skipped" in caplog.text
    lines = metrics_lib.read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line["update_skipped"]] == [3]


def test_best_checkpoint_stays(tmp_path, monkeypatch):
    loop = make_loop(tmp_path, monkeypatch, total=8)
    loop.config.sample.every = 2
    loop.checkpointer.retention.latest, loop.checkpointer.retention.metric = 1, "psnr_sample"
    quality = iter([20.0, 25.0, 24.0, 23.0])
    loop.sampler.write = lambda state: {"psnr_sample": next(quality)}
    loop.run(start())
    loop.checkpointer.close()
    assert sorted(p.name for p in loop.checkpointer.folder.iterdir()) == ["4", "8"]
    assert json.loads((tmp_path / "best.json").read_text()) == {
        "step": 4, "metric": "psnr_sample", "value": 25.0}


def test_signal_saves_and_stops(tmp_path, monkeypatch):
    loop = make_loop(tmp_path, monkeypatch, signal_at=3)
    with pytest.raises(RunInterrupted, match="SIGTERM at step 3 of 6; the state is saved"):
        loop.run(start())
    assert loop.checkpointer.latest_step() == 3
    loop.checkpointer.close()


def test_signal_in_the_last_step_still_finishes(tmp_path, monkeypatch):
    loop = make_loop(tmp_path, monkeypatch, signal_at=6)
    assert int(loop.run(start()).step) == 6
    loop.checkpointer.close()


def test_resumed_loop_writes_no_step_twice(tmp_path, monkeypatch):
    loop = make_loop(tmp_path, monkeypatch, total=5)
    loop.run(start())
    loop.checkpointer.close()
    again = make_loop(tmp_path, monkeypatch, step=4, total=6)
    again.run(start(4))
    again.checkpointer.close()
    lines = metrics_lib.read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


# Whole runs.

CONFIG = """
from tests import tiny

def get_config(variant=""):
    return tiny.config("pid_teacher", {data!r})
"""


@dataclasses.dataclass(frozen=True)
class Lab:
    """A data set, a config and a compilation cache that all runs of this file share."""

    folder: Path
    config: Path

    def environment(self, **more):
        return os.environ | {
            "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": str(Path(__file__).parents[1])} | more

    def launch(self, workdir, *flags, program=("-m", "pid_jax.main")):
        command = [sys.executable, *program, f"--config={self.config}",
                   f"--workdir={self.folder / workdir}", *flags]
        return subprocess.Popen(command, env=self.environment(), text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                start_new_session=True)

    def finish(self, workdir, *flags, **options):
        process = self.launch(workdir, *flags, **options)
        out, err = process.communicate(timeout=600)
        return process.returncode, out + err

    def lines(self, workdir):
        return metrics_lib.read(self.folder / workdir / "metrics.jsonl")

    def wait_for_step(self, workdir, step, process):
        while not any(line["step"] >= step for line in self.lines(workdir)):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)

    def arrays(self, workdir, step):
        folder = self.folder / workdir / "checkpoints" / str(step)
        return {name: jax.device_get(checkpoint.restore_tree(
            folder, name, checkpoint.placed(checkpoint.saved_shapes(folder, name), None)))
            for name in ("params", "ema", "optimizer")}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    data = tiny.write_dataset(folder / "data")
    config = folder / "config.py"
    config.write_text(CONFIG.format(data=str(data)))
    return Lab(folder, config)


STEPS = 120
LONG = (f"--config.total_steps={STEPS}", "--config.checkpoint.every=20")


@pytest.fixture(scope="module")
def finished(lab):
    """A run that nothing disturbed."""
    code, output = lab.finish("whole", *LONG)
    assert code == 0, output
    return "whole"


def test_run_leaves_what_the_docs_promise(lab, finished):
    folder = lab.folder / finished
    assert json.loads((folder / "config.json").read_text())["objective"] == "pid_teacher"
    assert "saved the checkpoint of step 120" in (folder / "log.txt").read_text()
    assert (folder / "plots" / "training.png").stat().st_size > 1000
    assert json.loads((folder / "samples" / "step_0000120.json").read_text())["columns"] == [
        "bicubic", "sample", "truth"]
    assert len(lab.lines(finished)) == STEPS


def test_killed_and_stopped_run_is_bit_identical(lab, finished):
    process = lab.launch("cut", *LONG)
    lab.wait_for_step("cut", 50, process)
    process.send_signal(signal.SIGKILL)
    process.wait()

    process = lab.launch("cut", *LONG)
    lab.wait_for_step("cut", 85, process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143, error
    assert "error: stopped by SIGTERM at step" in error

    code, output = lab.finish("cut", *LONG)
    assert code == 0, output
    jax.tree.map(np.testing.assert_array_equal, lab.arrays("cut", STEPS),
                 lab.arrays(finished, STEPS))
    assert _without_time(lab.lines("cut")) == _without_time(lab.lines(finished))


def _without_time(lines):
    return [{k: v for k, v in line.items() if k != "time"} for line in lines]


def test_finished_run_has_nothing_to_do(lab, finished):
    code, output = lab.finish(finished, *LONG)
    assert code == 0 and "done: 120 steps" in output


def test_other_model_in_the_workdir_is_refused(lab, finished):
    code, output = lab.finish(finished, *LONG, "--config.model.patch_depth=1")
    assert code == 2
    assert "error: the checkpoint" in output and "config.model.patch_depth: 2 -> 1" in output


def test_fewer_steps_than_done_are_refused(lab, finished):
    code, output = lab.finish(finished, "--config.total_steps=100")
    assert code == 2 and "past config.total_steps 100" in output


RAISES = """
import sys
from pid_jax import command_line, main
from pid_jax.training import sampling_hooks

def broken(self, state):
    print("raising", flush=True)
    raise RuntimeError("broken sampler")

sampling_hooks.Sampler.write = broken
sys.exit(command_line.run(main.main, sys.argv))
"""


def test_exception_in_the_loop_ends_everything_quickly(lab, finished):
    process = lab.launch("raises", *LONG, "--config.sample.every=2", "--config.data.workers=1",
                         program=("-c", RAISES))
    assert process.stdout.readline() == "raising\n"
    began = time.monotonic()
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert process.returncode == 1 and "broken sampler" in error
    while time.monotonic() - began < 10 and _group_lives(process.pid):
        time.sleep(0.1)
    assert not _group_lives(process.pid), "worker processes are left"


def _group_lives(leader):
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


RESTORES_ON_FOUR = """
import sys
from pathlib import Path
import jax
from pid_jax import objectives
from pid_jax.parallel import mesh as mesh_lib
from pid_jax.training import checkpoint, restore

whole, copy = map(Path, sys.argv[1:])
config = checkpoint.read_config(checkpoint.find_step_folder(whole))
config.mesh.data, config.mesh.fsdp = 2, 2
mesh = mesh_lib.make_mesh(config.mesh, config.data.batch_size)
source = checkpoint.Checkpointer(whole, 9)
state, data = restore.initial_state(config, objectives.build(config), mesh, source)
assert len(jax.tree.leaves(state)[0].sharding.device_set) == 4
divided = [leaf for leaf in jax.tree.leaves(state) if not leaf.sharding.is_fully_replicated]
assert divided, "no leaf is divided over fsdp"
target = checkpoint.Checkpointer(copy, 9)
target.save(state, data, config)
target.close()
"""


def test_restores_on_another_number_of_devices(lab, finished):
    environment = lab.environment(XLA_FLAGS="--xla_force_host_platform_device_count=4")
    subprocess.run([sys.executable, "-c", RESTORES_ON_FOUR, lab.folder / finished,
                    lab.folder / "copy"], env=environment, check=True)
    jax.tree.map(np.testing.assert_array_equal, lab.arrays("copy", STEPS),
                 lab.arrays(finished, STEPS))


@pytest.mark.parametrize("flags, sentence", [
    (["--config.totl_steps=1"], "config.totl_steps is not a known key; did you mean 'total_steps'"),
    (["--workdir="], "--workdir is missing"),
])
def test_bad_command_line_is_one_sentence(lab, flags, sentence):
    code, output = lab.finish("bad", *flags)
    last = output.strip().splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and sentence in last, output


@pytest.mark.parametrize("path, value, sentence", [
    ("data.path", "/nowhere", "/nowhere is not a packed data set"),
    ("data.image_size", 36, "the patch size .8. does not divide 36"),
    ("data.image_size", 40, "does not divide 40; choose 32 or 48"),
    ("sample.image_size", 40, "does not divide 40; choose 32 or 48"),
    ("codec.name", "flus", "flus"),
    ("mesh.data", 3, "needs 3 devices; there are 1"),
    ("init_from", "/nowhere", "there is no checkpoint at /nowhere"),
    ("resume", "/nowhere", "there is no checkpoint at /nowhere"),
])
def test_bad_config_is_refused_before_compilation(lab, tmp_path, path, value, sentence):
    config = tiny.config("pid_teacher", lab.folder / "data")
    *sections, key = path.split(".")
    section = config[sections[0]] if sections else config
    section[key] = value
    with pytest.raises(UserError, match=sentence):
        train.run(config, tmp_path)


@pytest.mark.parametrize("path", [None, "", "/proc/nowhere"])
def test_workdir_must_be_writable(lab, path):
    with pytest.raises(UserError, match="--workdir"):
        train.run(tiny.config("pid_teacher", lab.folder / "data"), path)
