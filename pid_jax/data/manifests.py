"""Lists of pictures or latents to decode, one JSON object a line.

    {"image": "cat.png", "prompt": "a cat", "sigma": [0, 0.2], "seed": 3, "id": "first"}

`image` (or `latent`) is a path, relative to the manifest's folder; the rest may be left out.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from pid_jax.errors import UserError

ENDING = ".jsonl"
KEYS = ("prompt", "sigma", "seed", "id", "frame")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line. Attributes: path; name: "00000000_cat", or its `id`; prompt, sigmas, seed, frame:
    None where the line does not say."""

    path: Path
    name: str
    prompt: str | None = None
    sigmas: tuple[float, ...] | None = None
    seed: int | None = None
    frame: str | None = None


def read(path: Path, kind: str) -> list[Entry]:
    """The entries of a manifest, all of them checked.

    Args:
      kind: "image" or "latent", the key of the path.
    Raises:
      UserError: unreadable, or a line that is no such object; its number is said.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may hold U+2028
    except OSError as error:
        raise UserError(f"the manifest {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the manifest {path} is not UTF-8 text: {error.reason} at byte "
                        f"{error.start}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"the manifest {path} is empty; write one JSON object a line")
    return [_entry(f"{path}, line {number}", path.parent, kind, index, line)
            for index, (number, line) in enumerate(numbered)]


def _entry(where: str, folder: Path, kind: str, index: int, line: str) -> Entry:
    try:
        held = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no JSON: {str(error)[:100]}") from error
    if not isinstance(held, dict) or not isinstance(held.get(kind), str) or not held[kind]:
        raise UserError(f'{where} names no {kind}; write {{"{kind}": "PATH", ...}}')
    for key in held:
        if key not in (kind, *KEYS):
            raise UserError(f"{where} has the unknown key {key!r}; known: {kind}, "
                            f"{', '.join(KEYS)}")
    if "\0" in held[kind]:
        raise UserError(f"{where}: the path of {kind} holds a zero byte")
    path = folder / held[kind]
    name = _of_kind(where, held, "id", str) or f"{index:08d}_{path.stem}"
    return Entry(path, name, _of_kind(where, held, "prompt", str), _sigmas(where, held),
                 _of_kind(where, held, "seed", int), _of_kind(where, held, "frame", str))


def _of_kind(where: str, held: dict[str, Any], key: str, kind: type) -> Any:
    value = held.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise UserError(f"{where}: {key} is {value!r}; expected "
                        f"{'a text' if kind is str else 'a whole number'}")
    return value


def _sigmas(where: str, held: dict[str, Any]) -> tuple[float, ...] | None:
    value = held.get("sigma")
    if value is None:
        return None
    levels = value if isinstance(value, list) else [value]
    if not levels or not all(isinstance(level, int | float) and not isinstance(level, bool)
                             for level in levels):
        raise UserError(f"{where}: sigma is {value!r}; expected a number or a list of numbers")
    try:
        return tuple(map(float, levels))
    except OverflowError as error:
        raise UserError(f"{where}: sigma is too large; expected a number from 0 to 1") from error
