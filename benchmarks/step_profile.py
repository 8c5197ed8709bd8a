"""Where does the time of a training step go?

    python -m benchmarks.step_profile [--size 256] [--batch 2] [--unroll 6] [--repeats 3] [--top 12]
                                      [--torch-python PYTHON] [--json FILE]

Traces training steps of the mid-size PixelDiT and sums what each operation took by the part of
the network and the pass that it belongs to. Seconds are of the thread that runs an operation;
products are shared between threads, so that the sum lies below the threads' time.

With an interpreter that has torch, steps of the same network there (benchmarks/peer_torch.py,
which keeps freed memory, too) are traced in turn with ours, and a table sets the kinds of
operations side by side.
"""

import argparse
import collections
import contextlib
import gzip
import json
import re
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.network import MID_SIZE, make_batch, training_step
from benchmarks.peer import KEEP_FREED, MODEL, random_params, started_peer
from pid_jax import models
from pid_jax.files import atomic_write
from pid_jax.training.optim import AdamW

PATHS = {"_patch_path": "patch blocks", "_pixel_path": "pixel blocks"}
SCOPES = ("modulations", "projections", "attention", "feed-forward")
PRODUCTS = ("dot", "ynn_fusion")
OPTIMIZER = "optimizer and average"
KINDS = ("products", "attention", OPTIMIZER, "everything else")
# Operations of PyTorch by kind; what matches none is everything else.
TORCH_KINDS = {
    "attention": r"scaled_dot_product",
    "products": r"aten::(add|b|badd)?mm$|mkl",
    OPTIMIZER: r"adamw|foreach|Optimizer|aten::(lerp_|mul_|linalg_vector_norm|clamp)$"}
KERNEL_NAMES = {"TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE": "1"}


def operations(text: str) -> dict[str, str]:
    """Instruction -> where in the program it comes from, of a compiled program's text."""
    return dict(re.findall(r'^\s*(?:ROOT )?%?([\w.-]+) = .*?(?:op_name="([^"]*)"|$)', text,
                           re.MULTILINE))


def part_of(origin: str) -> str:
    """Part of the network and pass that an operation belongs to."""
    if "PixelDiT" not in origin:
        return OPTIMIZER
    path = next((title for name, title in PATHS.items() if name in origin), "embeddings")
    scope = next((name for name in SCOPES if name in origin), "the rest")
    way = "backward" if "transpose(" in origin else "forward"
    return f"{path}, {scope}, {way}" if path in PATHS.values() else f"{path}, {way}"


def kind_of(name: str, origin: str) -> str:
    """One of KINDS."""
    part = part_of(origin)
    if part == OPTIMIZER:
        return part
    if ", attention," in part:
        return "attention"
    return "products" if name.startswith(PRODUCTS) else "everything else"


def torch_kind_of(name: str) -> str:
    """One of KINDS."""
    return next((kind for kind, pattern in TORCH_KINDS.items() if re.search(pattern, name)),
                "everything else")


class TracedStep:
    """A training step of ours, compiled, with its state.

    Attributes:
      origins: instruction -> where in the program it comes from.
    """

    def __init__(self, params: Mapping, inputs: Mapping, unroll: int):
        net = models.build_model(MODEL, **MID_SIZE, unroll=unroll)
        optimizer, self.inputs = AdamW(1e-4), inputs
        self.carry = jax.tree.map(jnp.copy, (params, optimizer.init(params), params))
        self.program = training_step(net, optimizer).lower(self.carry, inputs).compile()
        self.origins = operations(self.program.as_text())

    def run(self) -> None:
        """One step."""
        self.carry = jax.block_until_ready(self.program(self.carry, self.inputs))

    def trace(self) -> dict[str, float]:
        """Seconds by instruction of one step, without loops (what they run is listed itself)."""
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.run()
            file = next(Path(folder).rglob("*.trace.json.gz"))
            with gzip.open(file) as stream:
                events = json.load(stream)["traceEvents"]
        return sums(((event["name"], event.get("dur", 0) / 1e6) for event in events
                     if event.get("ph") == "X" and event["name"] in self.origins
                     and not event["name"].startswith("while")), lambda name: name)


def sums(seconds: Iterable[tuple[str, float]], group: Callable[[str], str]) -> dict[str, float]:
    """Seconds by the group of an operation."""
    found = collections.Counter()
    for name, value in seconds:
        found[group(name)] += value
    return found


def medians(traces: list[Mapping[str, float]]) -> dict[str, float]:
    """Median over all traces, by key."""
    return {name: statistics.median(one.get(name, 0.0) for one in traces)
            for name in set().union(*traces)}


def measure(size: int, batch: int, unroll: int, repeats: int, python: str | None) -> dict:
    """Medians of traced steps.

    Returns:
      Seconds by part ("parts") and by instruction ("instructions", with its origin) of ours, and
      "kinds": side ("jax" or a mode of PyTorch) -> kind -> seconds; "operations": mode -> name.
    """
    params = random_params(models.build_model(MODEL, **MID_SIZE))
    inputs = make_batch(size, batch)
    step = TracedStep(params, inputs, unroll)
    traces = {"jax": step.trace}
    warm = {"jax": step.run}
    with contextlib.ExitStack() as stack:
        if python:
            peer = stack.enter_context(started_peer(python, params, KEEP_FREED | KERNEL_NAMES))
            name = peer.add_batch("batch", inputs)
            for mode in ("eager", "compile"):
                traces[mode] = lambda mode=mode: peer.trace("step", mode, name)
                warm[mode] = lambda mode=mode: peer.run("step", mode, name)
        for run in [*warm.values()] * 3:
            run()
        found = {side: [] for side in traces}
        for _ in range(repeats):
            for side, trace in traces.items():
                found[side].append(trace())
    origins = step.origins
    groups = {"jax": lambda name: kind_of(name, origins[name])}
    instructions = medians(found["jax"])
    return {"parts": medians([sums(one.items(), lambda name: part_of(origins[name]))
                              for one in found["jax"]]),
            "kinds": {side: medians([sums(one.items(), groups.get(side, torch_kind_of))
                                     for one in rows]) for side, rows in found.items()},
            "instructions": {name: [value, origins[name]]
                             for name, value in instructions.items()},
            "operations": {side: medians(rows) for side, rows in found.items() if side != "jax"}}


def parts_table(found: Mapping, top: int) -> Iterator[str]:
    """The parts, in Markdown, and the slowest instructions."""
    total = sum(found["parts"].values())
    yield "| part | ms | share |\n|---|---|---|"
    for part, value in collections.Counter(found["parts"]).most_common():
        yield f"| {part} | {1e3 * value:.0f} | {value / total:.0%} |"
    slowest = sorted(found["instructions"].items(), key=lambda row: -row[1][0])[:top]
    for name, (value, origin) in slowest:
        yield f"{1e3 * value:8.1f} ms  {name:28} {part_of(origin)}"


def kinds_table(kinds: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Milliseconds by kind and side, in Markdown."""
    yield f"| kind | {' | '.join(f'{side} ms' for side in kinds)} |"
    yield "|---|" + "---|" * len(kinds)
    for kind in KINDS:
        cells = [f"{1e3 * seconds.get(kind, 0.0):.0f}" for seconds in kinds.values()]
        yield f"| {kind} | {' | '.join(cells)} |"
    yield f"| all | {' | '.join(f'{1e3 * sum(s.values()):.0f}' for s in kinds.values())} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--unroll", type=int, default=MID_SIZE["patch_depth"])
    parser.add_argument("--repeats", type=int, default=3, help="traced steps, of which medians")
    parser.add_argument("--top", type=int, default=12, help="instructions to list")
    parser.add_argument("--torch-python", help="an interpreter that has torch")
    parser.add_argument("--json")
    options = parser.parse_args()
    timing.keep_freed_memory()
    found = measure(options.size, options.batch, options.unroll, options.repeats,
                    options.torch_python)
    print("\n".join(parts_table(found, options.top)))
    print("\n".join(kinds_table(found["kinds"])))
    if options.json:
        with atomic_write(options.json) as file:
            json.dump({**found, **vars(options), "machine": timing.machine()}, file, indent=1)


if __name__ == "__main__":
    main()
