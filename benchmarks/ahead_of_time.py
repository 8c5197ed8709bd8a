"""What would a training step of every full-size config take of a TPU slice?

    python -m benchmarks.ahead_of_time --json FILE [--topology v5e:4x4] [--configs a,b]
                                       [--minutes M]

Compiles each config's step, encoders included (their weights are not needed), by
`python -m pid_jax.parallel.aot` in a process of its own, which takes half a minute to ten minutes;
FILE keeps the rows, and those that it holds are not compiled again, so that --minutes can end a
run early. A row says what bounds the step: products at the chips' peak (recomputation included), or
bytes between chips at the links' rate, and how far the rough estimate lies above the bound.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from pid_jax.ahead_of_time.report import REMAT_FORWARDS
from pid_jax.ahead_of_time.topology import GENERATIONS, GIB
from pid_jax.files import atomic_write

FOLDER = Path("configs")
SMALL = ("quickstart", "digits")
# Data x fsdp x sequence on 16 chips, and pictures of a batch: large pictures divide their tokens.
SHAPES = {"pid": ("1x4x4", 4), "pixeldit_t2i_2kto4k": ("1x4x4", 8), "pixeldit_t2i": ("1x4x4", 4)}
OTHERS = ("1x16x1", 32)


def full_size_configs() -> list[str]:
    """Names of the configs that need accelerators."""
    return sorted(path.stem for path in FOLDER.glob("*.py")
                  if not path.stem.startswith((*SMALL, "__")))


def compile_row(name: str, topology: str) -> dict:
    """The report of one config; of one that is refused, the reason."""
    mesh, batch = next((shape for start, shape in SHAPES.items() if name.startswith(start)), OTHERS)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        done = subprocess.run(
            [sys.executable, "-m", "pid_jax.parallel.aot", f"--config={FOLDER / name}.py",
             f"--topology={topology}", f"--mesh={mesh}", f"--config.data.batch_size={batch}",
             f"--json={file}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if file.exists():
            return {"config": name, **json.loads(file.read_text())[0]}
        reasons = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        return {"config": name, "topology": topology, "fits": False,
                "refusal": (reasons or done.stderr.splitlines()[-1:] or ["no message"])[-1]}


def bounds(row: Mapping) -> dict[str, float]:
    """Seconds that products, and bytes between chips, take at least."""
    chip, flops = GENERATIONS[row["topology"].partition(":")[0]], row["flops"]
    again = REMAT_FORWARDS[row["remat"]]
    # A training step is three forward passes without recomputation.
    total = sum(flops[kind] * (1 + more / 3) for kind, more in zip(("matmul", "attention"), again))
    return {"products": total / chip.peak / row["devices"],
            "links": sum(row["collectives"].values()) / chip.link}


def table(rows: list[Mapping]) -> Iterator[str]:
    """In Markdown; memory in GiB per chip."""
    yield ("| config | slice, mesh | picture, batch | arguments | temporaries | of | PFLOP "
           "| collectives GiB | Mcycles | bound s | rough s, over the bound |")
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        if "flops" not in row:
            yield f"| {row['config']} | {row['topology']} | {row['refusal']} |" + " |" * 8
            continue
        least = bounds(row)
        kind = max(least, key=least.get)
        end = "does not fit | |" if not row["fits"] else (
            f"{least[kind]:.3f} {kind} | {row['seconds']:.3f}, "
            f"{row['seconds'] / least[kind]:.1f} |")
        arguments = sum(row["arguments"].values())
        yield (f"| {row['config']} | {row['topology']}, {'x'.join(map(str, row['mesh'].values()))} "
               f"| {row['height']}x{row['width']}, {row['batch']} | {arguments / GIB:.2f} | "
               f"{row['temporaries'] / GIB:.2f} | {row['limit'] / GIB:.2f} | "
               f"{sum(row['flops'].values()) / 1e15:.3f} | "
               f"{sum(row['collectives'].values()) / GIB:.1f} | {row['cycles'] / 1e6:.0f} | {end}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="keeps the rows")
    parser.add_argument("--topology", default="v5e:4x4", help="of 16 chips")
    parser.add_argument("--configs", help="comma-separated names; default: all full-size ones")
    parser.add_argument("--minutes", type=float, default=float("inf"),
                        help="start no further compilation after so long")
    options = parser.parse_args()
    names = options.configs.split(",") if options.configs else full_size_configs()
    rows = json.loads(options.json.read_text()) if options.json.exists() else []
    started = time.monotonic()
    for name in names:
        if any((row["config"], row["topology"]) == (name, options.topology) for row in rows):
            continue
        if time.monotonic() - started > 60 * options.minutes:
            break
        rows.append(compile_row(name, options.topology))
        with atomic_write(options.json) as file:
            json.dump(rows, file, indent=1)
        print(f"{name}: done", file=sys.stderr, flush=True)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
