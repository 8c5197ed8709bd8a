"""Where does the time of a training step go?

    python -m benchmarks.step_profile [--size 256] [--batch 2] [--unroll 6] [--top 12] [--json FILE]

Traces one training step of the mid-size PixelDiT and sums what each operation took by the part of
the network and the pass that it belongs to. Seconds are of the thread that runs an operation;
products are shared between threads, so that the sum lies below the threads' time.
"""

import argparse
import collections
import gzip
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.network import MID_SIZE, make_batch, training_step
from benchmarks.peer import MODEL, random_params
from pid_jax import models
from pid_jax.files import atomic_write
from pid_jax.training.optim import AdamW

PATHS = {"_patch_path": "patch blocks", "_pixel_path": "pixel blocks"}
SCOPES = ("modulations", "projections", "attention", "feed-forward")
PRODUCTS = ("dot", "ynn_fusion")


def operations(text: str) -> dict[str, str]:
    """Instruction -> where in the program it comes from, of a compiled program's text."""
    return dict(re.findall(r'^\s*(?:ROOT )?%?([\w.-]+) = .*?(?:op_name="([^"]*)"|$)', text,
                           re.MULTILINE))


def part_of(origin: str) -> str:
    """Part of the network and pass that an operation belongs to."""
    if "PixelDiT" not in origin:
        return "optimizer and average"
    path = next((title for name, title in PATHS.items() if name in origin), "embeddings")
    scope = next((name for name in SCOPES if name in origin), "the rest")
    way = "backward" if "transpose(" in origin else "forward"
    return f"{path}, {scope}, {way}" if path in PATHS.values() else f"{path}, {way}"


def trace(step, carry, batch) -> dict[str, float]:
    """Seconds by instruction name of one call, loops left out (what they run is listed itself)."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step(carry, batch))
        file = next(Path(folder).rglob("*.trace.json.gz"))
        with gzip.open(file) as stream:
            events = json.load(stream)["traceEvents"]
    seconds = collections.Counter()
    for event in events:
        if event.get("ph") == "X":
            seconds[event["name"]] += event.get("dur", 0) / 1e6
    return seconds


def measure(size: int, batch: int, unroll: int) -> dict:
    """Seconds by part, by kind of operation, and by instruction with its origin."""
    net = models.build_model(MODEL, **MID_SIZE, unroll=unroll)
    params, inputs, optimizer = random_params(net), make_batch(size, batch), AdamW(1e-4)
    carry = jax.tree.map(jnp.copy, (params, optimizer.init(params), params))
    program = training_step(net, optimizer).lower(carry, inputs).compile()
    for _ in range(3):
        carry = jax.block_until_ready(program(carry, inputs))
    origins = operations(program.as_text())
    seconds = {name: value for name, value in trace(program, carry, inputs).items()
               if name in origins and not name.startswith("while")}
    parts, kinds = collections.Counter(), collections.Counter()
    for name, value in seconds.items():
        parts[part_of(origins[name])] += value
        kinds["products" if name.startswith(PRODUCTS) else "everything else"] += value
    return {"parts": parts, "kinds": kinds,
            "instructions": {name: [value, origins[name]] for name, value in seconds.items()}}


def table(found: Mapping, top: int) -> Iterator[str]:
    """The parts, the kinds and the slowest instructions, in Markdown."""
    total = sum(found["parts"].values())
    yield "| part | ms | share |\n|---|---|---|"
    for part, value in collections.Counter(found["parts"]).most_common():
        yield f"| {part} | {1e3 * value:.0f} | {value / total:.0%} |"
    yield "by kind: " + ", ".join(f"{kind} {value / total:.0%}"
                                  for kind, value in found["kinds"].items())
    slowest = sorted(found["instructions"].items(), key=lambda row: -row[1][0])[:top]
    for name, (value, origin) in slowest:
        yield f"{1e3 * value:8.1f} ms  {name:28} {part_of(origin)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--unroll", type=int, default=MID_SIZE["patch_depth"])
    parser.add_argument("--top", type=int, default=12, help="instructions to list")
    parser.add_argument("--json")
    options = parser.parse_args()
    timing.keep_freed_memory()
    found = measure(options.size, options.batch, options.unroll)
    print("\n".join(table(found, options.top)))
    if options.json:
        with atomic_write(options.json) as file:
            json.dump({**found, **vars(options), "machine": timing.machine()}, file, indent=1)


if __name__ == "__main__":
    main()
