"""How long do saving and restoring a checkpoint take, and how long does training wait for it?

    python -m benchmarks.checkpoint [--folder DIR] [--repeats 3] [--json FILE]

The mid-size PixelDiT of `benchmarks.network` with optimizer and average (0.9 GB). "blocked" is the
time until the state may be overwritten, "written" until the checkpoint is complete; "plain write"
is as many bytes by one `write` and `fsync`. Runs take turns, each in a folder of its own. The
restored state is compared with the saved one bit by bit.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from benchmarks import timing
from benchmarks.network import MID_SIZE
from configs.common import networks
from pid_jax import objectives
from pid_jax.config import base_config
from pid_jax.parallel.mesh import single_device
from pid_jax.training.checkpoint import Checkpointer, placed, restore_state
from pid_jax.training.state import TrainState


def mid_size_config() -> ConfigDict:
    """A text-to-image run of the mid-size network."""
    config = base_config()
    config.objective = "pixeldit_t2i"
    config.model = ConfigDict(networks.pixeldit_t2i(**MID_SIZE))
    config.text = ConfigDict({"name": "hashed", "width": MID_SIZE["txt_embed_dim"], "length": 64})
    return config


def timed(function: Callable[[], object], seconds: list[float]) -> object:
    """What a call gives; its seconds go to the end of the list."""
    start = time.perf_counter()
    result = function()
    seconds.append(time.perf_counter() - start)
    return result


def one_round(folder: Path, state: TrainState, config: ConfigDict, nbytes: int,
              seconds: dict[str, list[float]]) -> None:
    """Writes plainly, saves, restores, compares."""
    timed(lambda: plain_write(folder / "plain", nbytes), seconds["plain write"])
    checkpointer = Checkpointer(folder, keep=1)
    start = time.perf_counter()
    timed(lambda: checkpointer.save(state, {"step": 0}, config), seconds["save, blocked"])
    checkpointer.wait()
    seconds["save, written"].append(time.perf_counter() - start)
    step = checkpointer.folder / str(checkpointer.latest_step())
    checkpointer.close()
    abstract = placed(jax.eval_shape(lambda: state), single_device())
    restored, _ = timed(lambda: jax.block_until_ready(restore_state(step, abstract)),
                        seconds["restore"])
    same = jax.tree.map(lambda a, b: bool((a == b).all()), state, restored)
    assert all(jax.tree.leaves(same)), "the restored state is another one"


def plain_write(path: Path, nbytes: int) -> None:
    """The least that writing so many bytes can take here."""
    part = np.random.default_rng(0).bytes(1 << 24)
    with open(path, "wb") as file:
        for _ in range(nbytes >> 24):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="on the disk to measure; default: the system's temporary")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    config = mid_size_config()
    state = jax.jit(objectives.build(config).init)(jax.random.key(0))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    seconds = {name: [] for name in ("plain write", "save, blocked", "save, written", "restore")}
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            one_round(Path(folder), state, config, nbytes, seconds)
    timing.report(f"checkpoint of {nbytes / 1e9:.2f} GB", seconds, options.json, bytes=nbytes)
    for name, times in seconds.items():
        print(f"{name:28}{nbytes / 1e6 / statistics.median(times):9.0f} MB/s")


if __name__ == "__main__":
    main()
