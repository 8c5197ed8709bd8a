"""What does each choice bring that makes a training step fast on a CPU?

    python -m benchmarks.choices [--size 256] [--batch 2] [--repeats 7] [--json FILE]

Loss and gradients of the mid-size PixelDiT, as they are and with each choice undone, in turn:
one product for the gradient of a kernel, one small product per patch for that of the pixels'
layers, erf in place of erfc in the GELU, unrolled blocks, and freed memory that the process keeps.
"""

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

import jax

from benchmarks import timing
from benchmarks.network import MID_SIZE, make_batch
from benchmarks.peer import MODEL, functions_of, random_params
from pid_jax import host_memory, models
from pid_jax.models import blocks, layers

AS_IT_IS, ALL_UNDONE = "as it is", "all of these undone"
GIVEN_BACK = ", freed memory given back"
GLIBC_DEFAULTS = ((host_memory.M_MMAP_MAX, 65536), (host_memory.M_TRIM_THRESHOLD, 128 * 1024))


def erfc_gelu(x: jax.Array) -> jax.Array:
    """JAX's own exact GELU."""
    return jax.nn.gelu(x, approximate=False)


UNDONE = {
    "gradients of products by JAX": (layers, "product", layers.product.__wrapped__),
    "gradients of the pixels' layers by JAX": (
        blocks, "channel_product", blocks.channel_product.__wrapped__),
    "GELU with erfc": (blocks, "gelu", erfc_gelu),
}


def compiled(patches: Mapping, unroll: int, params: Mapping, batch: Mapping) -> Callable:
    """Loss and gradients with `patches` (module, name, value) in place while they are traced."""
    net = models.build_model(MODEL, **MID_SIZE, unroll=unroll)
    with contextlib.ExitStack() as stack:
        for module, name, value in patches.values():
            stack.enter_context(mock.patch.object(module, name, value))
        return jax.jit(functions_of(net)["gradients"]).lower(params, batch).compile()


def programs(params: Mapping, batch: Mapping) -> dict[str, Callable[[], object]]:
    """What is timed, by name; the first is the program as it is."""
    depth = MID_SIZE["patch_depth"]
    how = {AS_IT_IS: ({}, depth)}
    how |= {name: ({name: patch}, depth) for name, patch in UNDONE.items()}
    how |= {"a loop over blocks": ({}, 1), ALL_UNDONE: (UNDONE, 1)}
    made = {name: compiled(*choice, params, batch) for name, choice in how.items()}
    return {name: lambda program=program: program(params, batch)
            for name, program in made.items()}


def measure(size: int, batch: int, repeats: int) -> dict[str, list[float]]:
    """Seconds by program, then of the first and the last with malloc as glibc has it."""
    params = random_params(models.build_model(MODEL, **MID_SIZE))
    calls = programs(params, make_batch(size, batch))
    seconds = timing.interleaved(calls, repeats)
    host_memory.set_malloc(GLIBC_DEFAULTS)
    ends = {name + GIVEN_BACK: calls[name] for name in (AS_IT_IS, ALL_UNDONE)}
    return seconds | timing.interleaved(ends, repeats)


def table(seconds: Mapping[str, list[float]]) -> Iterator[str]:
    """Medians and how much longer each takes than the program as it is, in Markdown."""
    base = statistics.median(seconds[AS_IT_IS])
    yield "| | s | against as it is |\n|---|---|---|"
    for name, values in seconds.items():
        median = statistics.median(values)
        yield f"| {name} | {median:.3f} | {median / base:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json")
    options = parser.parse_args()
    timing.keep_freed_memory()
    seconds = measure(options.size, options.batch, options.repeats)
    print("\n".join(table(seconds)))
    timing.report(f"loss and gradients, {options.size} px, batch {options.batch}", seconds,
                  options.json, size=options.size, batch=options.batch)


if __name__ == "__main__":
    main()
