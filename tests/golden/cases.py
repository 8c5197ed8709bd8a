"""Golden cases: numbers of the PyTorch references, read from folders with an `index.json`.

A folder belongs to a family (`pid`, `encoders`, `ditok`, `pixeldit`). Every case has a JSON file
and mostly a safetensors file of the same name. Handlers register with `@handles`.
"""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

COMMITTED = Path(__file__).parent / "data"
FAMILIES = ("pid", "encoders", "ditok", "pixeldit")


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden case: `meta` is its JSON; arrays are loaded on first use (torch layouts)."""

    family: str
    name: str
    folder: Path

    @functools.cached_property
    def meta(self) -> dict:
        return json.loads((self.folder / f"{self.name}.json").read_text())

    @functools.cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        file = self.folder / f"{self.name}.safetensors"
        return load_file(file) if file.exists() else {}

    @property
    def tolerance(self) -> dict:
        return self.meta.get("tolerance", {})

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        return self.under("in/")

    @property
    def outputs(self) -> dict[str, np.ndarray]:
        return self.under("out/")

    def under(self, prefix: str) -> dict[str, np.ndarray]:
        """The tensors whose name starts with `prefix`, the prefix cut off."""
        return {k[len(prefix):]: v for k, v in self.tensors.items() if k.startswith(prefix)}

    def params(self, key: str = "params") -> dict[str, np.ndarray]:
        """The torch state dict that `meta[key]` names in the folder's shared pool."""
        pool = parameter_pool(self.folder)
        return {name: pool[entry] for name, entry in self.meta[key].items()}


@functools.cache
def parameter_pool(folder: Path) -> Mapping[str, np.ndarray]:
    return load_file(folder / "params_pool.safetensors")


Check = Callable[[Case], None]
_HANDLERS: list[tuple[str, re.Pattern, Check]] = []


def handles(family: str, pattern: str) -> Callable[[Check], Check]:
    """Registers a check for the cases of `family` whose name fully matches `pattern`."""

    def register(check: Check) -> Check:
        _HANDLERS.append((family, re.compile(pattern), check))
        return check

    return register


def handlers_for(case: Case) -> list[Check]:
    """Every check registered for the case."""
    return [check for family, pattern, check in _HANDLERS
            if family == case.family and pattern.fullmatch(case.name)]


def families_built() -> set[str]:
    """Families with at least one registered check."""
    return {family for family, _, _ in _HANDLERS}


def golden_folders() -> list[Path]:
    """Case folders named by PID_GOLDEN_DIR (folders or parents of several); default: committed."""
    roots = os.environ.get("PID_GOLDEN_DIR") or str(COMMITTED)
    folders = []
    for root in (Path(part).resolve() for part in roots.split(os.pathsep) if part):
        found = [root] if (root / "index.json").exists() else sorted(
            p.parent for p in root.glob("*/index.json"))
        if not found:
            raise FileNotFoundError(
                f"PID_GOLDEN_DIR names {root}, which holds no index.json and no folder with one")
        folders.extend(found)
    return folders


def family_of(folder: Path) -> str:
    """The family of a case folder, from its name or, failing that, from its cases' own words."""
    for family in FAMILIES:
        if family in re.split(r"[^a-z0-9]+", folder.name.lower()):
            return family
    index = json.loads((folder / "index.json").read_text())
    return index.get("family", "pid")


def collect() -> Iterator[Case]:
    """All cases of all folders; files that an index names but the folder lacks are no failure."""
    for folder in golden_folders():
        index = json.loads((folder / "index.json").read_text())
        for name in _case_names(index):
            if (folder / f"{name}.json").exists():
                yield Case(family_of(folder), name, folder)


def _case_names(index: dict) -> list[str]:
    cases = index["cases"]
    if isinstance(cases, dict):
        return list(cases)
    return [c if isinstance(c, str) else c.get("case") or c["name"] for c in cases]


def assert_close(actual, expected, atol: float, rtol: float = 0.0, name: str = "value") -> None:
    """Fails with the name, the worst element and both tolerances when arrays differ."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (
        f"{name}: shape {actual.shape}, expected {expected.shape}")
    bound = atol + rtol * np.abs(expected)
    excess = np.where(np.isfinite(actual), np.abs(actual - expected) - bound, np.inf)
    excess = np.where(actual == expected, -np.inf, excess)
    if excess.size and excess.max() > 0:
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        raise AssertionError(
            f"{name}: {int((excess > 0).sum())} of {excess.size} differ; worst at {worst}: "
            f"{actual[worst]!r} against {expected[worst]!r} (atol {atol}, rtol {rtol})")
