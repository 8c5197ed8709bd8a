"""Reads what a compiled program does from its HLO text: collectives, loop turns, cycle estimates.

XLA's `cost_analysis` counts the body of a loop once and Pallas kernels as nothing. Here bodies
count as often as the loop turns, read from `known_trip_count` or from the one constant that the
loop's condition compares with (loops of `lax.scan` count from 0 by 1); loops that tell neither
count once and are reported. Pallas kernels stay uncounted and are reported.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
         "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8}

_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$")
_OPCODE = re.compile(r"(?<=[\s})\]])([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|branch_computations)=\{?((?:%?[\w.-]+(?:, )?)+)\}?")
_CONDITION = re.compile(r"\bcondition=%?([\w.-]+)")
_CONSTANT = re.compile(r"^s32\[\]\S* constant\((\d+)\)")
_CHAIN = re.compile(r'chain_id="(\w+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_GROUP_LIST = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_GROUP_IOTA = re.compile(r"replica_groups=\[(?:\d+,)*(\d+)\]<=")


@dataclasses.dataclass
class Summary:
    """Totals of one run of a program on one chip.

    Attributes:
      collectives: kind -> bytes that the chip receives (sends, for reduce-scatter).
      collective_calls: kind -> how often.
      cycles: XLA's estimates summed, without Pallas kernels; copy_cycles: of that, in copies.
      kernels: name of a Pallas or library kernel -> calls.
      unknown_loops: loops whose number of turns the text does not tell.
    """

    collectives: Counter = dataclasses.field(default_factory=Counter)
    collective_calls: Counter = dataclasses.field(default_factory=Counter)
    cycles: int = 0
    copy_cycles: int = 0
    kernels: Counter = dataclasses.field(default_factory=Counter)
    unknown_loops: int = 0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    result: str  # the text of its type
    text: str  # everything after the equals sign


def summarise(text: str) -> Summary:
    """Reads the HLO text of a compiled module (`compiled.as_text()`)."""
    computations, entry = _computations(text)
    summary = Summary()
    _Walk(computations, summary).visit(entry, 1, entry, fused=False)
    return summary


def _computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    found: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = header[2]
            found[current] = []
            entry = current if header[1] else entry
        elif current and (instruction := _parse(line)):
            found[current].append(instruction)
    return found, entry


def _parse(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if not match:
        return None
    opcode = _OPCODE.search(match[2])
    if not opcode:
        return None
    return Instruction(match[1], opcode[1], match[2][:opcode.start()], match[2])


@dataclasses.dataclass
class _Walk:
    """Adds up computations, following calls; `chains` are async collectives already counted."""

    computations: dict[str, list[Instruction]]
    summary: Summary
    chains: set[tuple[str, str]] = dataclasses.field(default_factory=set)

    def visit(self, name: str, turns: int, caller: str, fused: bool) -> None:
        """Adds computation `name`, `turns` times; the cycles of a fusion stand at its caller.

        `caller` is the innermost computation around it that is no fusion.
        """
        for instruction in self.computations.get(name, ()):
            if self._goes_on(instruction, caller):
                continue
            _add(instruction, turns, fused, self.summary)
            inner = turns * self._loop_turns(instruction)
            fusion = fused or instruction.opcode == "fusion"
            for called in _called(instruction):
                self.visit(called, inner, caller if fusion else called, fusion)

    def _goes_on(self, instruction: Instruction, caller: str) -> bool:
        """Whether it is a later piece of an asynchronous collective spread over fusions."""
        chain = _CHAIN.search(instruction.text)
        if not chain or instruction.opcode not in COLLECTIVES:
            return False
        key = (caller, instruction.opcode + chain[1])
        known = key in self.chains
        self.chains.add(key)
        return known

    def _loop_turns(self, instruction: Instruction) -> int:
        if instruction.opcode != "while":
            return 1
        trips = _TRIPS.search(instruction.text) or self._compared_constant(instruction)
        self.summary.unknown_loops += trips is None
        return int(trips[1]) if trips else 1

    def _compared_constant(self, loop: Instruction) -> re.Match | None:
        condition = _CONDITION.search(loop.text)
        lines = self.computations.get(condition[1], ()) if condition else ()
        constants = [match for line in lines if (match := _CONSTANT.match(line.text))]
        return constants[0] if len(constants) == 1 else None


def _called(instruction: Instruction) -> Iterator[str]:
    if instruction.opcode in ("async-done", "async-update"):
        return
    for match in _CALLED.finditer(instruction.text):
        yield from (name.strip().lstrip("%") for name in match[1].split(","))


def _add(instruction: Instruction, turns: int, fused: bool, summary: Summary) -> None:
    kind = instruction.opcode.removesuffix("-start")
    if kind in COLLECTIVES:
        summary.collectives[kind] += turns * collective_bytes(instruction, kind)
        summary.collective_calls[kind] += turns
    if instruction.opcode == "custom-call" and _is_kernel(instruction.text):
        summary.kernels[re.sub(r"\.\d+$", "", instruction.name)] += turns
    cycles = _CYCLES.search(instruction.text)
    if cycles and not fused:
        summary.cycles += turns * int(cycles[1])
        summary.copy_cycles += turns * int(cycles[1]) * instruction.opcode.startswith("copy")


def _is_kernel(text: str) -> bool:
    return any(f'custom_call_target="{target}' in text for target in ("tpu_custom_call", "__cudnn"))


def collective_bytes(instruction: Instruction, kind: str) -> int:
    """Bytes of a collective's result; for reduce-scatter, of what goes in."""
    arrays = [_array_bytes(*match.groups()) for match in _ARRAY.finditer(instruction.result)]
    if instruction.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
        return max(arrays)  # the pair (what goes in, what comes out), and flags
    if kind == "reduce-scatter":
        return sum(arrays) * _group_size(instruction.text)
    return sum(arrays)


def _array_bytes(dtype: str, dims: str) -> int:
    return BYTES.get(dtype, 1) * math.prod(int(dim) for dim in dims.split(",") if dim)


def _group_size(text: str) -> int:
    listed = _GROUP_LIST.search(text)
    if listed:
        return len(listed[1].split(","))
    iota = _GROUP_IOTA.search(text)
    return int(iota[1]) if iota else 1
