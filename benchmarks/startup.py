"""How long until the first step, and what does the persistent compilation cache save?

    python -m benchmarks.startup [--repeats 2] [--json FILE]

Every run is a process of its own that imports the package, builds the mid-size PixelDiT and runs
its training step on three bucket shapes, each twice: first with an empty cache folder (cold), then
with what that run left there (warm). Compilations of the step are counted: one per bucket shape,
none repeated.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from pid_jax.files import atomic_write

SHAPES = ((128, 128), (96, 160), (160, 96))
COMPILED = "/jax/core/compile/backend_compile_duration"
PARTS = ("import", "initial state", *(f"{h}x{w}, first" for h, w in SHAPES),
         *(f"{h}x{w}, again" for h, w in SHAPES), "compiling", "whole process")


def child(folder: str) -> dict:
    """Runs here; gives seconds by part, and how often the step was compiled."""
    started = time.perf_counter()
    import jax

    from benchmarks.network import MID_SIZE, make_batch, training_step
    from pid_jax import models
    from pid_jax.training.optim import AdamW

    seconds, compiled = {"import": time.perf_counter() - started}, []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(duration) if event == COMPILED else None)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    start = time.perf_counter()
    net, optimizer = models.build_model("pixeldit_t2i", **MID_SIZE), AdamW(1e-4)

    @jax.jit
    def initial(key):
        params = models.init_parameters(net, key)
        return params, optimizer.init(params), jax.tree.map(lambda leaf: leaf + 0, params)

    carry = jax.block_until_ready(initial(jax.random.key(1)))
    seconds["initial state"] = time.perf_counter() - start
    step = training_step(net, optimizer)
    batches = {shape: make_batch(max(shape), 1) for shape in SHAPES}
    for turn in ("first", "again"):
        for (height, width), batch in batches.items():
            batch = {name: leaf[:, :height, :width] if leaf.ndim == 4 else leaf
                     for name, leaf in batch.items()}
            jax.block_until_ready(batch)
            start = time.perf_counter()
            carry = jax.block_until_ready(step(carry, batch))
            seconds[f"{height}x{width}, {turn}"] = time.perf_counter() - start
    return {"seconds": {**seconds, "compiling": sum(compiled)}, "programs": step._cache_size()}


def run(folder: str) -> dict:
    """One process."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "benchmarks.startup", "--child", folder],
                          check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    found["seconds"]["whole process"] = time.perf_counter() - start
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child)))
        return
    runs = {"cold": [], "warm": []}
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            for name in runs:
                runs[name].append(run(folder))
    medians = {name: {part: statistics.median(one["seconds"][part] for one in found)
                      for part in PARTS} for name, found in runs.items()}
    print("| | cold s | warm s | warm / cold |\n|---|---|---|---|")
    for part in PARTS:
        cold, warm = medians["cold"][part], medians["warm"][part]
        print(f"| {part} | {cold:.2f} | {warm:.2f} | {warm / cold:.0%} |")
    programs = {name: [one["programs"] for one in found] for name, found in runs.items()}
    print(f"programs of the step for {len(SHAPES)} bucket shapes: {programs}")
    if options.json:
        from benchmarks import timing
        with atomic_write(options.json) as file:
            json.dump({"runs": runs, "machine": timing.machine()}, file, indent=1)


if __name__ == "__main__":
    main()
