"""Runs every golden case of PID_GOLDEN_DIR (default: the committed subset)."""

import importlib
import pkgutil

import pytest

import tests.golden
from tests.golden import cases

for module in pkgutil.iter_modules(tests.golden.__path__):
    if module.name.startswith(cases.FAMILIES):
        importlib.import_module(f"tests.golden.{module.name}")

# Kinds that belong to parts of the project which do not exist yet, each with its part.
NOT_BUILT: dict[tuple[str, str], str] = {}


def part_not_built(case: cases.Case) -> str | None:
    """The unbuilt part that a case belongs to, if any."""
    if case.family not in cases.families_built():
        return f"the {case.family} family"
    for (family, prefix), part in NOT_BUILT.items():
        if case.family == family and case.name.startswith(prefix):
            return part
    return None


@pytest.mark.parametrize("case", list(cases.collect()), ids=lambda c: f"{c.folder.name}/{c.name}")
def test_case(case):
    checks = cases.handlers_for(case)
    if not checks:
        part = part_not_built(case)
        assert part, f"no check knows the kind of case {case.name} in {case.folder.name}"
        pytest.skip(f"{case.name} belongs to {part}, which is not built yet")
    for check in checks:
        check(case)
