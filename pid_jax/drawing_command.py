"""What `generate` and `decode` share: flags, and pictures with a JSON beside each."""

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pid_jax
from pid_jax import loading, pictures
from pid_jax.data import command
from pid_jax.errors import UserError
from pid_jax.files import atomic_write
from pid_jax.images import to_uint8
from pid_jax.parallel import multihost

GRID_ROWS = 16  # a sheet shows at most this many rows


def make_parser(program: str, description: str, out_required: bool = True
                ) -> argparse.ArgumentParser:
    """A parser with the flags of both commands."""
    parser = command.Parser(prog=f"python -m {program}", description=description)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER",
                        help="a workdir (its newest checkpoint) or the folder of one step")
    parser.add_argument("--out", type=Path, required=out_required, metavar="FOLDER",
                        help="where the pictures go; pictures of the same name are replaced")
    parser.add_argument("--which", default="ema", metavar="WEIGHTS",
                        help="ema (or another average by its name), net: the last weights, or "
                        "untrained: those before training")
    parser.add_argument("--weights", default=loading.STORED, choices=loading.KEPT_AS,
                        help="int8 or fp8: kernels of the patch blocks in 8 bits; default: all as "
                        "stored")
    parser.add_argument("--lora_scale", type=float, metavar="SCALE",
                        help="strength of low-rank adapters: 0 for none, 1 (default) as trained")
    parser.add_argument("--steps", type=int, help="solver steps; default: as the run's samples")
    parser.add_argument("--guidance", type=float,
                        help="classifier-free guidance, 1 for none; default: as the run's samples")
    parser.add_argument("--negative_prompt", metavar="TEXT",
                        help="text that guidance leads away from; default: as the run's samples")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--sequence", type=command.count, default=1, metavar="DEVICES",
                        help="over which each picture's tokens and the weights are divided")
    return parser


def run(main: Callable[[Sequence[str]], None]) -> int:
    """Calls `main` with the command line's arguments, in one process or several."""
    def joined(arguments: Sequence[str]) -> None:
        warnings.showwarning = lambda message, *_, **__: command.warn(str(message))
        multihost.start()
        with multihost.leaving_alone():
            main(arguments)
            multihost.barrier("all pictures are written")

    return command.run(joined, sys.argv[1:])


def keep_weights(drawer: loading.Drawer, kind: str) -> None:
    """Keeps weights as `--weights` says, and tells what that saves and changes."""
    change = drawer.keep_weights_as(kind)
    if change is not None:
        command.show(str(change))


def parse_size(text: str) -> tuple[int, int]:
    """An argparse type: "256x384" -> (height, width) = (256, 384)."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(p.isascii() and p.isdigit() and int(p) > 0 for p in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write HEIGHTxWIDTH, such as 256x384")
    return int(parts[0]), int(parts[1])


def read_text(path: Path) -> str:
    """A UTF-8 file's text without a byte order mark; UserError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def write_picture(path: Path, picture: np.ndarray, note: Mapping[str, Any]) -> None:
    """Writes float [H, W, 3] in [-1, 1] as a PNG with `note` as JSON beside it.

    The JSON comes first, so that no PNG is ever without one. A picture that is not finite raises
    before anything is written.
    """
    pixels = to_uint8(picture)
    write_json(path.with_suffix(".json"),
               {"picture": path.name, "size": list(pixels.shape[:2]),
                "pid_jax": pid_jax.__version__, **note})
    save_png(path, pixels)


def write_json(path: Path, content: Mapping[str, Any], everywhere: bool = False) -> None:
    """Writes a JSON file that appears complete or not at all, once for all processes.

    Bytes of a prompt or path that are no UTF-8 are written as JSON's own escapes.

    Args:
      everywhere: each process that calls writes, for files of its own.
    """
    if not (everywhere or multihost.is_writer()):
        return
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with atomic_write(path) as file:
        file.write(text.encode("utf-8", "backslashreplace").decode())


def save_png(path: Path, pixels: np.ndarray) -> None:
    """Writes uint8 [H, W, 3], once for all processes."""
    if multihost.is_writer():
        pictures.save_png(path, pixels)


def write_grid(path: Path, rows: Sequence[Mapping[str, np.ndarray]], names: Sequence[str],
               note: Mapping[str, Any]) -> None:
    """Writes a sheet: one row per picture, one column per name, all [H, W, 3] of one size."""
    rows, names = rows[:GRID_ROWS], names[:GRID_ROWS]
    columns = list(rows[0])
    sheet = pictures.grid([np.stack([row[column] for row in rows]) for column in columns])
    write_json(path.with_suffix(".json"), {"picture": path.name, "columns": columns,
                                           "rows": list(names), **note})
    save_png(path, sheet)
