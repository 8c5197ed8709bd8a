"""A training run without a network, for the fault campaign: real loop, data, checkpoints, restore.

Its only parameter is chaotic: each update multiplies any error, so a resume that is wrong in one
bit of the state or one batch of the data ends elsewhere. It runs in processes forked from one that
has imported everything, which makes a start cost less than a second.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from pid_jax import command_line, objectives, train
from pid_jax.objectives.base import Objective
from pid_jax.parallel import multihost
from pid_jax.training.state import TrainState
from tests import tiny


class Chaos(Objective):
    """x <- 3.9 x (1 - x), moved a little by the mean of the batch; `pause` seconds a step."""

    def __init__(self, config: ConfigDict, size: int, pause: float):
        self.config, self._size, self._pause = config, size, pause
        self.text, self.net = None, SimpleNamespace(patch_size=8)

    def init(self, rng: jax.Array) -> TrainState:
        params = {"kernel": jax.random.uniform(rng, (self._size, 1024))}
        return TrainState(step=jnp.int32(0), params=params,
                          opt_state={"kernel": jnp.zeros((self._size, 1024))}, ema={"ema": params})

    def check_picture(self, *size: int) -> None:
        """Any will do."""

    def solver_table(self, *sizes: int) -> None:
        """Nothing is solved."""

    def prepare(self, batch: dict) -> dict:
        time.sleep(self._pause)
        return {"image": batch["image"]}

    def step(self, state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        x, mean = state.params["kernel"], 0.01 * batch["image"].mean()
        new = {"kernel": jnp.clip(3.9 * x * (1 - x) + mean, 0.001, 0.999)}
        moved = {"kernel": 0.9 * state.opt_state["kernel"] + new["kernel"]}
        average = {"kernel": 0.9 * state.ema["ema"]["kernel"] + 0.1 * new["kernel"]}
        metrics = {"loss": new["kernel"].mean(), "grad_norm": jnp.float32(1),
                   "learning_rate": jnp.float32(1), "update_skipped": jnp.float32(0)}
        return TrainState(step=state.step + 1, params=new, opt_state=moved,
                          ema={"ema": average}), metrics

    drawing = examples = loss = sample_inputs = sample = None


class NoSampler:
    """Draws nothing."""

    def __init__(self, *_: Any):
        """Nothing."""

    def write(self, state: TrainState) -> dict:
        return {}


def config_of(data: str, options: dict) -> ConfigDict:
    """The tiny config with the changes of a case, by dotted path."""
    config = tiny.config("pixeldit_t2i", Path(data))
    config.checkpoint.keep = 3
    for path, value in options.items():
        *sections, key = path.split(".")
        section = config
        for name in sections:
            section = section[name]
        section[key] = value
    return config


def main(workdir: str, data: str, size: int = 64, pause: float = 0.0, fault: str = "",
         devices: int = 1, environment: dict | None = None, **options: Any) -> None:
    """Runs `train.run` to its end and exits as `pid_jax.main` does; output goes to `child.log`.

    Args:
      fault: name of a function here that prepares the process for its case.
      devices: of this process.
      environment: of one of several processes.
      options: `config` paths with __ for the dots.
    """
    index = (environment or {}).get(multihost.PROCESS, "0")
    log = os.open(f"{workdir}.{index}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1), os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
    objectives.build = lambda config, mesh=None: Chaos(config, size, pause)
    train.Sampler = NoSampler
    if fault:
        globals()[fault](Path(workdir))
    config = config_of(data, {name.replace("__", "."): value for name, value in options.items()})

    def run() -> None:
        jax.config.update("jax_num_cpu_devices", devices)
        multihost.start(environment or {})
        with multihost.leaving_alone():
            train.run(config, workdir)

    code = command_line.run(run, ["child"])
    sys.stderr.flush()
    with contextlib.suppress(Exception):
        if jax.distributed.is_initialized():
            jax.distributed.shutdown()
    os._exit(code)


def jumping_clock(workdir: Path) -> None:
    """The wall clock of a first start jumps two hours ahead at one step, four back at another."""
    if workdir.exists():
        return
    real, prepare, turn = time.time, Chaos.prepare, iter(range(10**9))
    jumps = {4: 7200.0, 8: -14_400.0}
    offset = [0.0]
    time.time = lambda: real() + offset[0]

    def jumps_first(self: Chaos, batch: dict) -> dict:
        offset[0] += jumps.get(next(turn), 0.0)
        return prepare(self, batch)

    Chaos.prepare = jumps_first


def small_files(workdir: Path) -> None:
    """Files end at 64 KiB, as on a disk without room."""
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


def vanishing_storage(workdir: Path) -> None:
    """The folder of checkpoints is gone, and cannot be made, from the second save on."""
    from pid_jax.training.checkpoint import Checkpointer
    save = Checkpointer.save

    def broken(self: Checkpointer, state: TrainState, *rest: Any) -> None:
        if int(state.step) > 4:
            self.wait()
            if self.folder.is_dir():
                self.folder.rename(self.folder.parent / "elsewhere")
                self.folder.write_text("")
        save(self, state, *rest)

    Checkpointer.save = broken


def slow_reader(workdir: Path) -> None:
    """Every batch is late."""
    from pid_jax.training import performance
    performance.SLOW_SECONDS = 0.0
