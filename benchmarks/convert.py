"""How fast are full-size weights converted, verified and exported, and in how much memory?

    python -m benchmarks.convert --folder DIR --json FILE [--keys FILE.json.gz]
                                 [--networks 2k_flux,2k_sdxl] [--dtypes float32,bfloat16]

For each network of a list of PyTorch names and shapes: a file of random numbers (`.pth` in float32,
`.safetensors` in bfloat16), then a plain copy of it, convert, verify and export, each in a process
of its own, whose time and peak resident memory the system reports. The exported file is compared
with the first one bit by bit. Needs three times the file's size (at most 5.6 GB) in DIR.

Rows that FILE already holds are not measured again. The table is in Markdown.
"""

import argparse
import dataclasses
import gzip
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from pid_jax.files import atomic_write
from tools.convert_torch_weights.readers import open_source
from tools.convert_torch_weights.readers.tensors import LazyTensor
from tools.convert_torch_weights.recognise import recognise
from tools.convert_torch_weights.safetensors_writer import write_safetensors
from tools.convert_torch_weights.torch_writer import write_torch_zip

KEYS = Path("tests/golden/data/pid/H01_full_size_keys.json.gz")
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
COMMANDS = ("convert", "verify", "export")
# A one in the lowest bit of each number of a 64-bit word.
_ONES = {2: 0x0001000100010001, 4: 0x0000000100000001}
_FAMILIES = ("flux2", "flux", "sd3", "sdxl", "qwenimage", "dinov2", "siglip")


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one process took: seconds by the clock and of processor, peak resident bytes."""

    seconds: float
    processor: float
    peak: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One network in one dtype; `costs` by command, "copy" among them; `nbytes` of the file."""

    network: str
    dtype: str
    nbytes: int
    costs: Mapping[str, Cost]
    equal: bool

    @property
    def copies(self) -> float:
        """The largest peak of the three commands, in copies of the weights."""
        return max(self.costs[name].peak for name in COMMANDS) / self.nbytes


def shapes_of(keys: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Network -> PyTorch name -> shape, of a golden list of full-size keys."""
    listed = json.loads(gzip.decompress(keys.read_bytes()))
    return {network: {key: tuple(shape) for key, (shape, _) in entry["keys"].items()}
            for network, entry in listed.items()}


def measure(network: str, shapes: Mapping[str, tuple[int, ...]], dtype: str, folder: Path) -> Row:
    """Writes, copies, converts, verifies and exports; leaves nothing in `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        ending = ".pth" if dtype == "float32" else ".safetensors"
        src, out, back = (Path(work) / name for name in (f"src{ending}", "out", f"back{ending}"))
        write_source(src, shapes, DTYPES[dtype])
        costs = {"copy": run(["dd", f"if={src}", f"of={back}", "bs=8M", "conv=fsync"])}
        back.unlink()
        model = recognise(shapes).model
        family = next((name for name in _FAMILIES if name in network), None)
        codec = ["--set", f"codec.name={family}"] if family and model == "pidnet" else []
        costs["convert"] = run(_tool("convert", "--src", src, "--dst", out, "--model", model,
                                     *codec))
        costs["verify"] = run(_tool("verify", src, out))
        costs["export"] = run(_tool("export", out, "--dst", back, "--prefix", "net."))
        return Row(network, dtype, src.stat().st_size, costs, same_tensors(src, back))


def write_source(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype) -> None:
    """A file of random bits, one bit of the exponent cleared: finite numbers of all sizes."""
    rng = np.random.Generator(np.random.SFC64(0))
    finite = ~(np.uint64(1 << 8 * dtype.itemsize - 2) * np.uint64(_ONES[dtype.itemsize]))

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        count = math.prod(shape)
        words = rng.integers(0, 1 << 64, count * dtype.itemsize // 8 + 1, np.uint64)
        words &= finite
        return words.view(dtype)[:count].reshape(shape)

    tensors = [LazyTensor(f"net.{key}", dtype, shape, lambda shape=shape: draw(shape))
               for key, shape in shapes.items()]
    with open(path, "wb") as file:
        if path.suffix == ".pth":
            write_torch_zip(file, tensors)
        else:
            write_safetensors(file, tensors, {"format": "pt"})


def _tool(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tools.convert_torch_weights", *map(str, arguments)]


def run(command: list[str]) -> Cost:
    """Runs a command to its end. Raises CalledProcessError with what it printed when it fails."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, printed)
    return Cost(time.monotonic() - started, usage.ru_utime + usage.ru_stime,
                usage.ru_maxrss * 1024)


def same_tensors(first: Path, second: Path) -> bool:
    """Whether two files hold the same names, and the same bits under each."""
    ours, theirs = open_source(first).tensors, open_source(second).tensors
    return ours.keys() == theirs.keys() and all(
        tensor.read().tobytes() == theirs[key].read().tobytes() for key, tensor in ours.items())


def table(rows: list[Row]) -> Iterator[str]:
    """The rows in Markdown: MB of the file per second of processor, and seconds by the clock."""
    yield ("| network | dtype | GB | plain copy | convert | verify | export | peak memory, copies "
           "| round trip |")
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        cells = [f"{row.nbytes / cost.processor / 1e6:,.0f} ({cost.seconds:.0f} s)"
                 for cost in (row.costs[name] for name in ("copy", *COMMANDS))]
        yield (f"| `{row.network}` | {row.dtype} | {row.nbytes / 1e9:.2f} | {' | '.join(cells)} | "
               f"{row.copies:.2f} | {'bit-equal' if row.equal else 'DIFFERENT'} |")


def read_rows(file: Path) -> list[Row]:
    """The rows measured before."""
    if not file.exists():
        return []
    return [Row(**entry | {"costs": {name: Cost(**cost) for name, cost in entry["costs"].items()}})
            for entry in json.loads(file.read_text(encoding="utf-8"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the files are made")
    parser.add_argument("--json", type=Path, required=True, help="keeps the rows")
    parser.add_argument("--keys", type=Path, default=KEYS)
    parser.add_argument("--networks", help="comma-separated; default: all that fit a command")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    arguments = parser.parse_args()
    shapes = shapes_of(arguments.keys)
    networks = arguments.networks.split(",") if arguments.networks else [
        name for name in shapes if recognise(shapes[name]).model != "discriminator"]
    rows = read_rows(arguments.json)
    for dtype in arguments.dtypes.split(","):
        for network in networks:
            if any((row.network, row.dtype) == (network, dtype) for row in rows):
                continue
            rows.append(measure(network, shapes[network], dtype, arguments.folder))
            with atomic_write(arguments.json) as file:
                json.dump([dataclasses.asdict(row) for row in rows], file, indent=1)
            print(f"{network} {dtype}: done", file=sys.stderr, flush=True)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
