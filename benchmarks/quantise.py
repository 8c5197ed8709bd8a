"""What do int8 and fp8 weights save, and what do they change in the pictures?

    python -m benchmarks.quantise [--checkpoint DIR] [--size 128x128] [--json FILE]

Bytes: of the full-size networks, counted on shapes. Differences, with a PiD checkpoint: its decoder
draws photographs' latents with float32 weights and arithmetic, with bfloat16 weights, and with
8-bit kernels beside bfloat16 weights, the last three in bfloat16 arithmetic. The photographs are
scikit-image's.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from benchmarks import timing
from pid_jax import models
from pid_jax.drawing_command import parse_size
from pid_jax.exporting.program import decoder_program
from pid_jax.files import atomic_write
from pid_jax.inference import PixelDecoder
from pid_jax.models.quantised import DTYPES, QuantisedKernel, quantise, stored_bytes

KINDS = ("float32", "bfloat16", *DTYPES)
PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket")
FULL_SIZE = {"PixelDiT 1.3B": ("pixeldit_t2i", {}),
             "PiD v1.5, flux": ("pidnet", {"lq_latent_channels": 16, "pit_lq_inject": True})}


def in_bfloat16(params: Any) -> Any:
    """Weights in bfloat16, 8-bit kernels as they are."""
    small = lambda leaf: isinstance(leaf, QuantisedKernel)
    return jax.tree.map(lambda leaf: leaf if small(leaf) else leaf.astype(jnp.bfloat16), params,
                        is_leaf=small)


def kinds(params: Any) -> dict[str, Any]:
    """The same weights, kept in each way."""
    return {"float32": params, "bfloat16": in_bfloat16(params),
            **{kind: in_bfloat16(quantise(params, kind)) for kind in DTYPES}}


def full_size_bytes() -> dict[str, dict[str, int]]:
    """Network -> way of keeping -> bytes of all weights."""
    found = {}
    for title, (name, options) in FULL_SIZE.items():
        net = models.build_model(name, **options)
        shapes = jax.eval_shape(lambda: kinds(models.init_parameters(net, jax.random.key(0))))
        found[title] = {kind: stored_bytes(shapes[kind]) for kind in KINDS}
    return found


def photographs(height: int, width: int) -> np.ndarray:
    """float32 [N, height, width, 3] in [-1, 1]."""
    from skimage import data
    resized = [np.asarray(Image.fromarray(getattr(data, name)()).resize((width, height),
                                                                        Image.Resampling.LANCZOS))
               for name in PHOTOGRAPHS]
    return np.stack(resized).astype(np.float32) / 127.5 - 1


def picture_differences(checkpoint: Path, size: tuple[int, int]) -> dict[str, dict[str, float]]:
    """Way of keeping -> difference to the bfloat16 pictures; of those, to the float32 ones."""
    decoder = PixelDecoder.from_checkpoint(checkpoint)
    scale = decoder.objective.net.sr_scale
    latents = np.asarray(decoder.objective.codec.encode(
        photographs(size[0] // scale, size[1] // scale)))
    pictures = {}
    for kind, params in kinds(decoder.checkpoint.params).items():
        other = PixelDecoder(dataclasses.replace(decoder.checkpoint, params=params))
        program = decoder_program(other, *size, dtype="float32" if kind == "float32" else
                                  "bfloat16")
        inputs = program.random_inputs(len(latents)) | {
            "latent": latents, "sigma": np.zeros(len(latents), np.float32),
            "text": np.repeat(decoder.objective.prompts([""]), len(latents), axis=0)}
        pictures[kind] = np.asarray(jax.jit(program.call)(program.weights, inputs))
    return {kind: _difference(pictures[kind] - pictures[
        "float32" if kind == "bfloat16" else "bfloat16"]) for kind in KINDS[1:]}


def _difference(difference: np.ndarray) -> dict[str, float]:
    """In steps of 255; the range of values is 2."""
    steps = np.abs(difference) * 127.5
    return {"largest": float(steps.max()), "mean": float(steps.mean()),
            "psnr": float(20 * np.log10(2 / np.sqrt(np.mean(difference**2))))}


def tables(sizes: Mapping, differences: Mapping) -> Iterator[str]:
    """Both tables, in Markdown."""
    yield "| network | " + " | ".join(f"{kind}, GB" for kind in next(iter(sizes.values()))) + " |"
    yield "|---|" + "---|" * len(next(iter(sizes.values())))
    for title, row in sizes.items():
        yield f"| {title} | " + " | ".join(f"{size / 1e9:.2f}" for size in row.values()) + " |"
    if differences:
        yield ""
        yield "| weights | compared with | mean difference, of 255 | largest | PSNR, dB |"
        yield "|---|---|---|---|---|"
    for kind, row in differences.items():
        other = "float32" if kind == "bfloat16" else "bfloat16"
        yield f"| {kind} | {other} | {row['mean']:.3f} | {row['largest']:.1f} | {row['psnr']:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="of PiD, for the differences")
    parser.add_argument("--size", type=parse_size, default=(128, 128), metavar="HEIGHTxWIDTH")
    parser.add_argument("--json")
    options = parser.parse_args()
    sizes = full_size_bytes()
    differences = {}
    if options.checkpoint:
        differences = picture_differences(options.checkpoint, options.size)
    print("\n".join(tables(sizes, differences)))
    if options.json:
        with atomic_write(options.json) as file:
            json.dump({"bytes": sizes, "differences": differences, "machine": timing.machine(),
                       "checkpoint": str(options.checkpoint), "size": options.size}, file, indent=1)


if __name__ == "__main__":
    main()
