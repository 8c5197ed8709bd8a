"""Whether a set of weights is the network of a config, and what may be missing or left out."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from pid_jax.errors import UserError
from tools.convert_torch_weights.assembly import entries_by_leaf
from tools.convert_torch_weights.layout import counted
from tools.convert_torch_weights.mappings import Table
from tools.convert_torch_weights.readers import LazyTensor
from tools.convert_torch_weights.recognise import recognise, title

LQ = ("lq_proj.", "pit_lq_gate.")
AUX_HEAD = ("lq_proj.lq_aux_rgb_head.",)
# In released files, but no parameters: the network computes them itself.
COMPUTED = frozenset({"pos_embed"})
CONSTANT_ATOL = 2**-8  # of tables of sines, stored in bfloat16 or better


@dataclasses.dataclass(frozen=True)
class Exceptions:
    """What a user allows: prefixes of keys that start fresh, and of keys that are left out."""

    fresh: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Match:
    """Weights that fit: the tensors to convert, keys that start fresh, keys that are left out."""

    tensors: Mapping[str, LazyTensor]
    fresh: tuple[str, ...]
    left_out: tuple[str, ...]


def match(path: Path, table: Table, tensors: Mapping[str, LazyTensor], allowed: Exceptions,
          hint: Callable[[], str] = str) -> Match:
    """Checks keys and shapes.

    Args:
      path: where the weights are from, for messages.
      table: the network of the config.
      tensors: the chosen weights by parameter name.
      allowed: the user's exceptions.
      hint: makes a sentence on which configs fit these weights; called when they do not fit.
    Raises:
      UserError: what the file is, what the config describes, and every missing, unknown or wrongly
        shaped key.
    """
    left_out = tuple(key for key in tensors if key not in table.entries
                     and (key in COMPUTED or key in table.constants
                          or key.startswith(allowed.dropped)))
    fresh = tuple(key for key in table.entries if key not in tensors
                  and key.startswith(allowed.fresh))
    used = {key: tensor for key, tensor in tensors.items() if key not in left_out}
    problems = (_problems(table, used, set(fresh)) + _half_fresh(table, set(fresh))
                + _other_constants(table, tensors))
    if problems:
        raise UserError(f"{path}: {_explanation(table, used, problems, hint)}")
    return Match(used, fresh, left_out)


def _problems(table: Table, tensors: Mapping[str, LazyTensor], fresh: set[str]) -> list[str]:
    shapes = table.shapes()
    missing = [f"{key} is missing" for key in shapes if key not in tensors and key not in fresh]
    unknown = [f"{key} is not known" for key in tensors if key not in shapes]
    wrong = [f"{key} has shape {list(tensors[key].shape)}, expected {list(shape)}"
             for key, shape in shapes.items() if key in tensors and tensors[key].shape != shape]
    kinds = [f"{key} holds {tensors[key].dtype}, expected floating point" for key in shapes
             if key in tensors and not is_floating(tensors[key])]
    return missing + unknown + wrong + kinds


def _other_constants(table: Table, tensors: Mapping[str, LazyTensor]) -> list[str]:
    """Stored tables that are not those which the network computes."""
    def differs(key: str) -> bool:
        ours, theirs = table.constants[key](), tensors[key]
        return ours.shape != theirs.shape or not np.allclose(
            theirs.read().astype(np.float32), ours, rtol=0, atol=CONSTANT_ATOL)

    return [f"{key} is not the fixed table that this network computes"
            for key in table.constants if key in tensors and differs(key)]


def is_floating(tensor: LazyTensor) -> bool:
    """Whether the tensor holds real numbers that can be cast to a parameter."""
    return tensor.dtype.name in ("float64", "float32", "float16", "bfloat16")


def _half_fresh(table: Table, fresh: set[str]) -> list[str]:
    """A stack is converted or fresh as a whole."""
    return [f"{entry.key} is missing" for entries in entries_by_leaf(table).values()
            for entry in entries
            if entry.key in fresh and not all(other.key in fresh for other in entries)]


def _explanation(table: Table, tensors: Mapping[str, LazyTensor], problems: list[str],
                 hint: Callable[[], str]) -> str:
    held = {key: tensor.shape for key, tensor in tensors.items()}
    found, wanted = recognise(held), recognise(table.shapes())
    names = title(found, held), title(wanted, table.shapes())
    same = names[0] == names[1]
    complete = not any(problem.endswith("is missing") for problem in problems)
    what = (f"the weights are {names[0]}, but the config describes {names[1]}" if not same else
            f"these weights are {names[0]} as in the config, but do not fit" if complete else
            f"these weights are not complete as {names[0]}")
    options = [f"{name} is {value!r} in the weights, {wanted.options[name]!r} in the config"
               for name, value in found.options.items()
               if name in wanted.options and wanted.options[name] != value]
    parts = [what, *([f"options that differ: {', '.join(options)}"] if options else []),
             *([] if same else filter(None, [hint()])), *_advice(problems),
             f"{counted(len(problems))} not as expected: {', '.join(problems)}"]
    return "; ".join(parts)


def _advice(problems: list[str]) -> list[str]:
    """The flag that allows all of the problems, if there is one."""
    def all_start(prefixes, ending):
        return all(p.startswith(prefixes) and p.endswith(ending) for p in problems)

    if all_start(AUX_HEAD, "is missing"):
        return ["--fresh-aux-head starts the auxiliary RGB head anew, or make the network without "
                "it: --set lq_aux_rgb_head=False"]
    if all_start(AUX_HEAD, "is not known"):
        return ["--drop-aux-head makes the network without the auxiliary RGB head"]
    if all_start(LQ, "is missing"):
        return ["--fresh-lq starts the LQ branch of PiD anew on this text-to-image backbone"]
    return []


def check_finite(path: Path, not_finite: list[str]) -> None:
    """Raises UserError with every key of the source that held nan or infinity."""
    if not_finite:
        raise UserError(f"{path}: {counted(len(not_finite))} with values that are not finite (nan "
                        f"or infinity): {', '.join(not_finite)}")
