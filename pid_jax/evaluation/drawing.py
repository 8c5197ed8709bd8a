"""Drawing many pictures in parts: over hosts, resumable, the same whatever the division.

Picture i is of class i mod classes and has the seed `seed + i`. Part k holds the pictures
k PART .. (k + 1) PART - 1 and is drawn by host k mod hosts; one that is there is not drawn again.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pid_jax.errors import UserError
from pid_jax.evaluation.features import check_pictures, read_arrays
from pid_jax.files import atomic_write

PART = 250
SETTINGS = "settings.json"

Draw = Callable[[Sequence[int], Sequence[int]], np.ndarray]
"""`draw(labels, seeds) -> uint8 [B, H, W, 3]`."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Attributes: count, pictures in all; classes; seed, of the first picture."""

    count: int
    classes: int
    seed: int = 0

    def labels(self, start: int, stop: int) -> list[int]:
        """Classes of a range of pictures: as many of each as possible."""
        return [i % self.classes for i in range(start, stop)]

    def parts(self) -> range:
        """Numbers of the parts."""
        return range(-(-self.count // PART))

    def bounds(self, part: int) -> tuple[int, int]:
        """First picture of a part, and one past its last."""
        return part * PART, min(self.count, (part + 1) * PART)


def draw_parts(plan: Plan, draw: Draw, folder: Path, settings: dict[str, Any], batch: int,
               host: int = 0, hosts: int = 1, show: Callable[[str], None] = lambda line: None
               ) -> None:
    """Draws this host's parts that are not there yet.

    Args:
      settings: everything that the pictures depend on; kept beside the parts, which serve for
        these settings only.
    Raises:
      UserError: the folder holds parts of other settings.
    """
    check_settings(folder, settings, writes=host == 0)
    for part in plan.parts()[host::hosts]:
        path = part_path(folder, part)
        if path.exists():
            continue
        start, stop = plan.bounds(part)
        pictures = [_draw_batch(plan, draw, first, min(first + batch, stop), batch)
                    for first in range(start, stop, batch)]
        with atomic_write(path, "wb") as file:
            np.savez(file, arr_0=np.concatenate(pictures))
        show(f"drew pictures {start} to {stop - 1} of {plan.count}")


def _draw_batch(plan: Plan, draw: Draw, start: int, stop: int, batch: int) -> np.ndarray:
    """Pictures start .. stop - 1, drawn in a full batch so that nothing compiles twice."""
    numbers = [min(i, stop - 1) for i in range(start, start + batch)]
    labels = [plan.labels(i, i + 1)[0] for i in numbers]
    return draw(labels, [plan.seed + i for i in numbers])[:stop - start]


def check_settings(folder: Path, settings: dict[str, Any], writes: bool) -> None:
    """Refuses a folder of other settings; writes these into a fresh one."""
    path = folder / SETTINGS
    if path.exists():
        held = _read_settings(path)
        changed = [f"{key} was {held.get(key)!r}, now {value!r}"
                   for key, value in json.loads(json.dumps(settings)).items()
                   if held.get(key) != value]
        if changed:
            raise UserError(f"{folder} holds pictures of other settings ({'; '.join(changed)}); "
                            "choose another --out")
    elif writes:
        with atomic_write(path) as file:
            json.dump(settings, file, indent=2)


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(held, dict):
            raise ValueError("they are no table")
    except ValueError as error:
        raise UserError(f"the settings {path} are damaged: {error}; choose another --out, or "
                        "remove the folder to draw its pictures again") from error
    return held


def part_path(folder: Path, part: int) -> Path:
    """File of a part."""
    return folder / f"part_{part:05d}.npz"


def gather(plan: Plan, folder: Path) -> np.ndarray:
    """All pictures in order, uint8 [count, H, W, 3]; every part must be there."""
    missing = [part for part in plan.parts() if not part_path(folder, part).exists()]
    if missing:
        raise UserError(f"{folder} lacks {len(missing)} of {len(plan.parts())} parts, the first is "
                        f"{part_path(folder, missing[0]).name}; run the command again")
    return np.concatenate([_read_part(plan, folder, part) for part in plan.parts()])


def _read_part(plan: Plan, folder: Path, part: int) -> np.ndarray:
    path, (start, stop) = part_path(folder, part), plan.bounds(part)
    pictures = read_arrays(path).get("arr_0", np.zeros(0))
    if len(check_pictures(pictures, path)) != stop - start:
        raise UserError(f"{path} holds {len(pictures)} pictures instead of {stop - start}; remove "
                        "it and run the command again")
    return pictures


def save_samples(path: Path, pictures: np.ndarray, labels: Sequence[int] | None) -> None:
    """The `.npz` that ADM's evaluation reads: arr_0 uint8 [N, H, W, 3], arr_1 the labels."""
    arrays = {"arr_0": pictures} | ({} if labels is None else {"arr_1": np.asarray(labels)})
    with atomic_write(path, "wb") as file:
        np.savez(file, **arrays)
