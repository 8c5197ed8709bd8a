"""How fast is the mid-size PixelDiT beside the same network in PyTorch, on the same CPU?

    python -m benchmarks.peer --torch-python PYTHON [--size 256] [--batch 2] [--repeats 5]
                              [--modes eager,compile] [--only forward,sampler,step] [--json FILE]
                              [--unroll 6] [--memory own]

PYTHON is an interpreter that has torch; the peer (benchmarks/peer_torch.py) runs there with this
run's weights, inputs and number of threads. Calls of ours and of the peer's take turns. The step is
loss, gradients, clipping, AdamW and an average; the sampler is four deterministic steps. A square
matrix product on either side says what the machine can do: the faster one is the peak.

The training step unrolls its blocks, as PyTorch does (--unroll 1: a loop, as drawing has). --memory
says who keeps the memory that it frees instead of giving it back to the kernel: own: this process,
as a training here does on a CPU, and PyTorch does not by itself; both; none.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.network import MID_SIZE, make_batch, training_step
from pid_jax import models
from pid_jax.diffusion import few_step
from pid_jax.files import atomic_write
from pid_jax.flops import count_flops, counted_attention
from pid_jax.training.optim import AdamW
from tools.convert_torch_weights.mappings import jax_to_torch, table_for

MODEL = "pixeldit_t2i"
SCRIPT = Path(__file__).with_name("peer_torch.py")
RUNS = ("forward", "sampler", "step")
STEPS = 4
SQUARE = 2048  # side of the matrices of the peak
# To glibc what `host_memory.keep_freed_memory` does.
KEEP_FREED = {"GLIBC_TUNABLES": f"glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0:"
                                f"glibc.malloc.trim_threshold={2**62}:glibc.malloc.hugetlb=1"}


class Peer:
    """The PyTorch process; answers one request at a time."""

    def __init__(self, python: str, folder: Path, options: Mapping, params: Mapping,
                 threads: int | None = None,
                 environment: Mapping[str, str] = MappingProxyType({})):
        """Writes weights and options into `folder`, where batches go too, and starts it."""
        self.folder = folder
        np.savez(folder / "weights.npz", **jax_to_torch(table_for(MODEL, dict(options)), params))
        (folder / "options.json").write_text(json.dumps(dict(options)))
        threads = threads or len(os.sched_getaffinity(0))
        self.process = subprocess.Popen(
            [python, str(SCRIPT), str(folder / "weights.npz"), str(folder / "options.json"),
             str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            # A killed run leaves half a library in torch.compile's shared cache.
            env=os.environ | environment | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")})

    def add_batch(self, name: str, arrays: Mapping[str, np.ndarray]) -> str:
        """Writes inputs in this project's layout; gives what requests call them."""
        path = self.folder / f"{name}.npz"
        np.savez(path, **{key: nchw(value) for key, value in arrays.items()})
        return str(path)

    def run(self, function: str, mode: str, batch: str) -> float:
        """Seconds of one call."""
        return self._ask({"run": function, "mode": mode, "batch": batch})["seconds"]

    def result(self, function: str, mode: str, batch: str) -> dict[str, np.ndarray]:
        """What one call gives, in PyTorch's layout; a single array is called "result"."""
        to = str(self.folder / "result.npz")
        self._ask({"save": function, "mode": mode, "batch": batch, "to": to})
        with np.load(to) as arrays:
            return dict(arrays)

    def trace(self, function: str, mode: str, batch: str) -> dict[str, float]:
        """Seconds by operation of one call, each without the operations that it calls."""
        return self._ask({"trace": function, "mode": mode, "batch": batch})["operations"]

    def _ask(self, request: dict) -> dict:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the peer ended with status {self.process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def nchw(array: np.ndarray) -> np.ndarray:
    """Pictures [B, H, W, C] -> [B, C, H, W]; other arrays as they are."""
    array = np.asarray(array)
    return np.ascontiguousarray(array.transpose(0, 3, 1, 2)) if array.ndim == 4 else array


def sampler_table() -> np.ndarray:
    """float32 [STEPS, 3]: time in [0, 1], weights of state and output."""
    table = few_step.make_table(few_step.student_times(STEPS), "velocity", "ode")
    return np.stack([table.times, table.state, table.output], axis=1)


def random_params(net: models.PixelDiT) -> dict:
    """Fresh parameters, and a last layer that is not zero."""
    params = dict(net.init(jax.random.key(1), method="all_parameters")["params"])
    kernel = params["final_layer"]["linear"]["kernel"]
    drawn = 0.1 * jax.random.normal(jax.random.key(2), kernel.shape)
    params["final_layer"] = {**params["final_layer"],
                             "linear": {**params["final_layer"]["linear"], "kernel": drawn}}
    return params


def functions_of(net: models.PixelDiT) -> dict[str, Callable]:
    """(params, batch) -> result, not jitted; the step lacks optimizer and average."""
    def forward(params, batch):
        return net.apply({"params": params}, batch["x"], batch["t"], batch["y"]).x

    def sampler(params, batch):
        def one(x, row):
            out = forward(params, {**batch, "x": x, "t": jnp.full(x.shape[:1], 1000 * row[0])})
            return row[1] * x + row[2] * out, None
        return jax.lax.scan(one, batch["x"], batch["table"])[0]

    def gradients(params, batch):
        return jax.grad(lambda p: jnp.mean((forward(p, batch) - batch["target"]) ** 2))(params)

    return {"forward": forward, "sampler": sampler, "gradients": gradients}


def flops_of(net: models.PixelDiT, params: Mapping, batch: Mapping) -> dict[str, float]:
    """FLOPs of each run, by the traced program."""
    counted = functions_of(net.clone(attention=counted_attention))
    found = {name: count_flops(counted[key], params, dict(batch)).total for name, key in
             (("forward", "forward"), ("sampler", "sampler"), ("step", "gradients"))}
    return found | {"matmul": 2.0 * SQUARE**3}


def ours(net: models.PixelDiT, params: Mapping, batch: Mapping,
         unroll: int) -> dict[str, Callable]:
    """What is timed here, by run; `unroll` is the step's."""
    functions, optimizer = functions_of(net), AdamW(1e-4)
    forward, sampler = (jax.jit(functions[name]) for name in ("forward", "sampler"))
    step = training_step(net.clone(unroll=unroll), optimizer)
    carry = [jax.tree.map(jnp.copy, (params, optimizer.init(params), params))]

    def one_step():
        carry[0] = step(carry[0], batch)
        return carry[0]

    product = jax.jit(jnp.matmul)
    return {"forward": lambda: forward(params, batch), "sampler": lambda: sampler(params, batch),
            "step": one_step, "matmul": lambda: product(batch["a"], batch["b"])}


def make_inputs(size: int, batch: int) -> dict[str, jax.Array]:
    """A batch, the sampler's table, and two square matrices."""
    squares = jax.random.normal(jax.random.key(3), (2, SQUARE, SQUARE))
    return {**make_batch(size, batch), "table": jnp.asarray(sampler_table()),
            "a": squares[0], "b": squares[1]}


@contextlib.contextmanager
def started_peer(python: str, params: Mapping, environment: Mapping[str, str]) -> Iterator[Peer]:
    """A peer of the mid-size network in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(python, Path(folder), MID_SIZE, params, environment=environment)
        try:
            yield peer
        finally:
            peer.close()


def differences(mine: Mapping[str, Callable], peer: Peer, batch: str,
                runs: tuple[str, ...]) -> dict[str, float]:
    """Largest difference over the largest value, of what both give."""
    found = {}
    for name in runs:
        if name != "step":
            expected, theirs = nchw(mine[name]()), peer.result(name, "eager", batch)["result"]
            found[name] = float(np.max(np.abs(theirs - expected)) / np.max(np.abs(expected)))
    return found


def measure(python: str, size: int, batch: int, repeats: int, modes: tuple[str, ...],
            runs: tuple[str, ...], unroll: int, environment: Mapping[str, str]) -> dict:
    """Seconds by run and side ("jax" or a mode of PyTorch), FLOPs and differences."""
    net = models.build_model(MODEL, **MID_SIZE)
    params, inputs = random_params(net), make_inputs(size, batch)
    mine = ours(net, params, inputs, unroll)
    with started_peer(python, params, environment) as peer:
        name = peer.add_batch("batch", inputs)
        different = differences(mine, peer, name, runs)
        calls = {}
        for run in (*runs, "matmul"):
            calls[run, "jax"] = mine[run]
            for mode in modes if run != "matmul" else modes[:1]:
                calls[run, mode] = lambda run=run, mode=mode: peer.run(run, mode, name)
        seconds = timing.interleaved(calls, repeats)
    return {"seconds": {run: {side: seconds[r, side] for r, side in seconds if r == run}
                        for run in (*runs, "matmul")},
            "flops": flops_of(net, params, inputs), "relative_difference": different,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(params))}


def table(found: Mapping, modes: tuple[str, ...]) -> Iterator[str]:
    """Medians, how much longer PyTorch takes, and fractions of the peak, in Markdown."""
    seconds, flops = found["seconds"], found["flops"]
    peak = flops["matmul"] / min(min(times) for times in seconds["matmul"].values())
    yield f"peak of a {SQUARE} x {SQUARE} product: {peak / 1e9:.0f} GFLOP/s"
    yield "| | GFLOP | JAX s | of peak | " + " | ".join(
        f"{mode} s | of peak | {mode} / JAX" for mode in modes) + " |"
    yield "|---|---|---|---|" + "---|---|---|" * len(modes)
    for run in (name for name in seconds if name != "matmul"):
        medians = {side: statistics.median(times) for side, times in seconds[run].items()}
        share = {side: f"{flops[run] / time / peak:.0%}" for side, time in medians.items()}
        cells = [f"{medians[mode]:.3f} | {share[mode]} | {medians[mode] / medians['jax']:.2f}"
                 for mode in modes]
        yield (f"| {run} | {flops[run] / 1e9:.0f} | {medians['jax']:.3f} | {share['jax']} | "
               f"{' | '.join(cells)} |")
    yield "largest relative difference: " + ", ".join(
        f"{run} {value:.1e}" for run, value in found["relative_difference"].items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", required=True, help="an interpreter that has torch")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--modes", default="eager,compile")
    parser.add_argument("--only", default=",".join(RUNS), help="of " + ",".join(RUNS))
    parser.add_argument("--unroll", type=int, default=MID_SIZE["patch_depth"])
    parser.add_argument("--memory", choices=("own", "both", "none"), default="own")
    parser.add_argument("--json")
    options = parser.parse_args()
    modes, runs = tuple(options.modes.split(",")), tuple(options.only.split(","))
    if options.memory != "none":
        timing.keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    found = measure(options.torch_python, options.size, options.batch, options.repeats, modes,
                    runs, options.unroll, KEEP_FREED if options.memory == "both" else {})
    print(f"mid-size PixelDiT, {found['parameters'] / 1e6:.1f}M parameters, {options.size} px, "
          f"batch {options.batch}, float32, {timing.machine()['cpus']} CPUs, median of "
          f"{options.repeats}, unroll {options.unroll}, memory {options.memory}")
    print("\n".join(table(found, modes)))
    if options.json:
        with atomic_write(options.json) as file:
            json.dump({**found, "machine": timing.machine(), "torch": torch_version(
                options.torch_python), **vars(options)}, file, indent=1)


def torch_version(python: str) -> str:
    """The peer's version of PyTorch."""
    return subprocess.run([python, "-c", "import torch; print(torch.__version__)"], check=True,
                          capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
