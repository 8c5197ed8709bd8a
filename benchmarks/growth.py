"""How do work and memory grow with the size of the picture and the depth of the network?

    python -m benchmarks.growth --out DIR [--sizes 512,1024,2048,4096] [--depths 7,14,28]
                                [--topology v5e:1]

The full-size PixelDiT (hidden 1536), one picture, one call of the network in bfloat16. FLOPs are
counted in the traced program; memory and estimated cycles are the compiler's for one chip of
--topology (without: FLOPs only). Also says how much more a training step is than a forward pass,
without and with recomputation, and how XLA's own count compares where it sees every loop. Writes
`growth.json` and `growth.png`.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from pid_jax.ahead_of_time import topology as topologies

topologies.prepare()

import jax  # noqa: E402 - after the variables that libtpu reads
import jax.numpy as jnp  # noqa: E402
import matplotlib.figure  # noqa: E402
import numpy as np  # noqa: E402

from pid_jax import models  # noqa: E402
from pid_jax.files import atomic_write  # noqa: E402
from pid_jax.flops import Flops, count_flops, counted_attention  # noqa: E402
from pid_jax.parallel import hlo  # noqa: E402
from pid_jax.parallel.mesh import make_mesh  # noqa: E402
from pid_jax.parallel.sequence import make_attention  # noqa: E402

GIB, TEXT, WIDTH = 2**30, 300, 2304
DEPTH, SIZE = 14, 1024


def inputs_of(size: int, text: int = TEXT) -> dict[str, jax.ShapeDtypeStruct]:
    """One picture and its caption of `text` tokens."""
    shape = lambda *sides: jax.ShapeDtypeStruct(sides, jnp.float32)
    return {"x": shape(1, size, size, 3), "t": shape(1), "y": shape(1, text, WIDTH)}


def forward_of(net: models.PixelDiT):
    """(params, inputs) -> picture."""
    return lambda params, inputs: net.apply({"params": params}, **inputs).x


def shapes_of(net: models.PixelDiT):
    """The parameters' shapes."""
    return jax.eval_shape(lambda: models.init_parameters(net, jax.random.key(0)))


def work(size: int, depth: int, remat: str = "none", training: bool = False) -> Flops:
    """FLOPs of a forward pass, or of loss and gradients with what they recompute."""
    net = models.build_model("pixeldit_t2i", patch_depth=depth, remat=remat,
                             attention=counted_attention)
    forward = forward_of(net)
    function = forward
    if training:
        function = jax.grad(lambda params, inputs: jnp.mean(forward(params, inputs) ** 2))
    return count_flops(function, shapes_of(net), inputs_of(size))


def compiled(size: int, depth: int, topology: topologies.Topology) -> dict[str, float]:
    """GiB of temporaries, of parameters, and estimated cycles of a forward pass on one chip."""
    mesh = make_mesh({"data": 1, "fsdp": 1, "sequence": 1}, 1, 1, topology.devices[:1])
    net = models.build_model("pixeldit_t2i", patch_depth=depth, dtype=jnp.bfloat16,
                             param_dtype=jnp.bfloat16, attention=make_attention(mesh), pit_chunks=8)
    place = jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])
    params, inputs = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        (shapes_of(net), inputs_of(size)))
    program = jax.jit(forward_of(net)).lower(params, inputs).compile()
    memory = program.memory_analysis()
    return {"temporaries": memory.temp_size_in_bytes / GIB,
            "parameters": memory.argument_size_in_bytes / GIB,
            "megacycles": hlo.summarise(program.as_text()).cycles / 1e6}


def xla_ratio() -> float:
    """XLA's FLOPs of a forward pass over ours, where every loop has one turn and all is visible.

    The caption has one token: XLA drops what the last block would do with it, the trace does not.
    """
    net = models.build_model("pixeldit_t2i", patch_depth=1, pixel_depth=1)
    inputs = inputs_of(512, text=1)
    program = jax.jit(forward_of(net)).lower(shapes_of(net), inputs).compile()
    counted = net.clone(attention=counted_attention)
    ours = count_flops(forward_of(counted), shapes_of(net), inputs).total
    return program.cost_analysis()["flops"] / ours


def rows(sizes: list[int], depths: list[int], topology) -> Iterator[dict]:
    """One size or depth each."""
    for size, depth in [(s, DEPTH) for s in sizes] + [(SIZE, d) for d in depths if d != DEPTH]:
        flops = work(size, depth)
        row = {"size": size, "depth": depth, "tokens": (size // 16) ** 2,
               "products": flops.matmul / 1e12, "attention": flops.attention / 1e12}
        yield row | (compiled(size, depth, topology) if topology else {})


def quadratic(row: Mapping) -> float:
    """TFLOP of the two products of attention over all pairs of tokens, of captions too."""
    net = models.PixelDiT()
    joint, pixels = (row["tokens"] + TEXT) ** 2, row["tokens"] ** 2
    return 4 * (net.hidden_size * row["depth"] * joint
                + net.pixel_attn_hidden_size * net.pixel_depth * pixels) / 1e12


def departure(found: list[Mapping]) -> float:
    """Largest departure of the products from a straight line in the tokens, as a fraction."""
    grown = [row for row in found if row["depth"] == DEPTH]
    tokens, work = (np.array([row[name] for row in grown]) for name in ("tokens", "products"))
    return float(np.max(np.abs(np.polyval(np.polyfit(tokens, work, 1), tokens) / work - 1)))


def table(found: list[Mapping]) -> Iterator[str]:
    """In Markdown."""
    columns = [name for name in ("parameters", "temporaries", "megacycles") if name in found[0]]
    yield ("| picture | blocks | tokens | products TFLOP | attention TFLOP | over 4 D n^2 |"
           + "".join(f" {name} |" for name in columns))
    yield "|---|---|---|---|---|---|" + "---|" * len(columns)
    for row in found:
        cells = "".join(f" {row[name]:.2f} |" for name in columns)
        yield (f"| {row['size']} | {row['depth']} | {row['tokens']} | {row['products']:.2f} | "
               f"{row['attention']:.2f} | {row['attention'] / quadratic(row):.3f} |{cells}")


def plot(found: list[Mapping], path: Path) -> None:
    """Work, and memory where it is known, over the tokens of a picture."""
    grown = [row for row in found if row["depth"] == DEPTH]
    figure = matplotlib.figure.Figure(figsize=(9, 3.5), layout="constrained")
    panels = [("TFLOP", ("products", "attention"))]
    if "temporaries" in grown[0]:
        panels.append(("GiB", ("parameters", "temporaries")))
    for axes, (unit, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for name in names:
            axes.loglog([row["size"] for row in grown], [row[name] for row in grown], "o-",
                        label=name, base=2)
        axes.set(xlabel="side of the picture, pixels", ylabel=unit)
        axes.legend()
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", default="512,1024,2048,4096")
    parser.add_argument("--depths", default="7,14,28")
    parser.add_argument("--topology", help="such as v5e:1")
    options = parser.parse_args()
    sizes, depths = ([int(part) for part in text.split(",")]
                     for text in (options.sizes, options.depths))
    topology = topologies.open_topology(options.topology) if options.topology else None
    found = list(rows(sizes, depths, topology))
    print("\n".join(table(found)))
    print(f"products over sizes depart from a straight line by at most {departure(found):.1e}")
    forward = work(SIZE, DEPTH).total
    steps = {remat: work(SIZE, DEPTH, remat, training=True).total / forward
             for remat in ("none", "attention", "full")}
    ratio = xla_ratio()
    print("loss and gradients over a forward pass, by remat: " + ", ".join(
        f"{remat} {value:.2f}" for remat, value in steps.items()))
    print(f"XLA's count over ours, one block of each kind: {ratio:.3f}")
    with atomic_write(options.out / "growth.json") as file:
        json.dump({"rows": found, "steps": steps, "xla": ratio, "topology": options.topology}, file,
                  indent=1)
    plot(found, options.out / "growth.png")


if __name__ == "__main__":
    main()
