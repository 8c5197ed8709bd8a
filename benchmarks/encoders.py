"""What does encoding a picture with the full-size Flux auto-encoder cost, in time and memory?

    python -m benchmarks.encoders [--size 1024] [--band 128] [--torch-python PYTHON] [--json FILE]
    python -m benchmarks.encoders --topology v5e:1 --size 4096 --band 256

Float32 on the CPU, random weights (84 million parameters), one process for each row, so that its
peak resident memory is its own: at once, in bands of rows, and with `--torch-python` the same
network of diffusers under that interpreter on as many threads. Time is the second call's; memory is
the peak less what the process held before the first call, weights included in both.

With `--topology` nothing runs: the encoder is compiled for one chip of it, in bfloat16 and in bands
(of 256 rows by default), and the compiler says what memory it needs.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

from pid_jax.files import atomic_write

GIB = 2**30
TORCH = """
import json, sys, time, resource, torch
from diffusers import AutoencoderKL
size, threads = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(threads)
down, up = ["DownEncoderBlock2D"] * 4, ["UpDecoderBlock2D"] * 4
vae = AutoencoderKL(down_block_types=down, up_block_types=up, layers_per_block=2,
                    block_out_channels=(128, 256, 512, 512), latent_channels=16,
                    use_quant_conv=False, use_post_quant_conv=False).eval()
image = torch.rand(1, 3, size, size) * 2 - 1
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, seconds = peak(), []
with torch.no_grad():
    for _ in range(2):
        start = time.perf_counter()
        vae.encode(image).latent_dist.mean
        seconds.append(time.perf_counter() - start)
print(json.dumps({"seconds": seconds, "before": before, "peak": peak()}))
"""


def peak() -> int:
    """Largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_here(size: int, band: int) -> dict:
    """Encodes twice in this process."""
    import jax
    import numpy as np

    from pid_jax.encoders.autoencoder_codec import AutoEncoderCodec, network_of
    from pid_jax.encoders.weights import random_params, shapes_of

    network = network_of("flux")
    params = jax.device_put(random_params(shapes_of(network)))
    codec = AutoEncoderCodec("flux", network, lambda: params, band=band)
    image = np.random.default_rng(1).uniform(-1, 1, (1, size, size, 3)).astype(np.float32)
    before, seconds = peak(), []
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(codec.encode(image))
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "before": before, "peak": peak()}


def in_process(command: list[str]) -> dict:
    """The last line that a command prints, as JSON."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(arguments: argparse.Namespace) -> dict[str, dict]:
    """A row for each way."""
    here = [sys.executable, "-m", "benchmarks.encoders", "--size", str(arguments.size), "--child"]
    rows: dict[str, Callable[[], dict]] = {
        "at once": lambda: in_process(here),
        f"bands of {arguments.band} rows": lambda: in_process([*here, str(arguments.band)])}
    if arguments.torch_python:
        threads = str(len(os.sched_getaffinity(0)))
        rows["diffusers, PyTorch"] = lambda: in_process(
            [arguments.torch_python, "-c", TORCH, str(arguments.size), threads])
    return {name: row() for name, row in rows.items()}


def compiled_memory(topology_name: str, size: int, band: int) -> dict[str, float]:
    """Bytes of arguments, results and temporaries on one chip, by the compiler; bfloat16."""
    from pid_jax.ahead_of_time import topology as topologies

    topologies.prepare()
    topology = topologies.open_topology(topology_name)
    import jax
    import jax.numpy as jnp

    from pid_jax.encoders.autoencoder_codec import AutoEncoderCodec, network_of
    from pid_jax.encoders.weights import shapes_of

    place = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def placed(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    network = network_of("flux")
    codec = AutoEncoderCodec("flux", network, dict, "bfloat16", band)
    params = jax.tree.map(lambda leaf: placed(leaf.shape, jnp.bfloat16), shapes_of(network))
    encode = jax.jit(lambda p, x: codec.with_params(p).encode(x))
    memory = encode.lower(params, placed((1, size, size, 3), jnp.float32)).compile(
    ).memory_analysis()
    return {"arguments": memory.argument_size_in_bytes, "results": memory.output_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--band", type=int, default=128)
    parser.add_argument("--torch-python", help="an interpreter that has torch and diffusers")
    parser.add_argument("--topology", help="compile for one chip of it instead")
    parser.add_argument("--json")
    parser.add_argument("--child", nargs="?", type=int, const=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(run_here(arguments.size, arguments.child)))
        return
    if arguments.topology:
        rows: dict = compiled_memory(arguments.topology, arguments.size, arguments.band)
        print(f"{arguments.size} px, bands of {arguments.band} rows, {arguments.topology}: "
              + ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in rows.items()))
    else:
        rows = measure(arguments)
        print(f"{arguments.size} px, float32, {len(os.sched_getaffinity(0))} CPUs")
        print(f"{'':24}{'first s':>9}{'second s':>10}{'GiB more':>10}{'peak GiB':>10}")
        for name, row in rows.items():
            first, second = row["seconds"]
            more, peak_now = (row["peak"] - row["before"]) / GIB, row["peak"] / GIB
            print(f"{name:24}{first:9.1f}{second:10.1f}{more:10.2f}{peak_now:10.2f}")
    if arguments.json:
        with atomic_write(arguments.json) as file:
            json.dump({"size": arguments.size, "band": arguments.band, "rows": rows}, file,
                      indent=1)


if __name__ == "__main__":
    main()
