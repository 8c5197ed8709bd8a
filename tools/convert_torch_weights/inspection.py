"""A report on a weight file or a checkpoint folder: what is in it and which network it is."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pid_jax.errors import UserError
from pid_jax.training.checkpoint import CARD, find_step_folder, read_json
from tools.convert_torch_weights.layout import OTHER, PROJECTOR, Layout, counted, read_layout
from tools.convert_torch_weights.orbax_io import stored_leaves
from tools.convert_torch_weights.readers import LazyTensor, Source, open_source
from tools.convert_torch_weights.recognise import recognise, title

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_SHOWN = 8  # entries that are no tensors


def inspect(path: str, every: bool = False) -> Iterator[str]:
    """Lines of the report.

    Args:
      path: weight file or folder of any kind, or a checkpoint folder of this project.
      every: one line for each tensor; else tensors that differ only in a block's number share one.
    """
    step = _checkpoint(Path(path))
    if step:
        yield from _inspect_checkpoint(step, every)
    else:
        yield from _inspect_source(open_source(path), every)


def _checkpoint(path: Path) -> Path | None:
    try:
        return find_step_folder(path) if path.is_dir() else None
    except UserError:
        return None


def _inspect_source(source: Source, every: bool) -> Iterator[str]:
    layout = read_layout(source)
    yield f"{source.path}: {source.format}, {_total(source.tensors.values())}"
    for prefix, count in layout.prefixes.items():
        yield f"  prefix {prefix or '(none)'}: {counted(count)}"
    for name, text in list(source.other.items())[:_SHOWN]:
        yield f"  besides: {name} = {text}"
    if len(source.other) > _SHOWN:
        yield f"  besides: {len(source.other) - _SHOWN} more entries that are no tensors"
    yield from _parts(layout, every)


def _parts(layout: Layout, every: bool) -> Iterator[str]:
    for part, tensors in layout.parts.items():
        yield f"part {part}: {_total(tensors.values())}"
        if part not in (PROJECTOR, OTHER):
            yield from _guess(tensors)
        yield from _listing(tensors, every)


def _guess(tensors: Mapping[str, LazyTensor]) -> Iterator[str]:
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    found = recognise(shapes)
    yield f"  this is {title(found, shapes)}"
    for reason in found.reasons:
        yield f"    {reason}"


def _total(tensors: Iterable[LazyTensor]) -> str:
    tensors = list(tensors)
    kinds = sorted({tensor.dtype.name for tensor in tensors})
    return (f"{counted(len(tensors))}, {sum(t.size for t in tensors):,} numbers, "
            f"{sum(t.nbytes for t in tensors):,} bytes, {', '.join(kinds) or 'no dtype'}")


def _listing(tensors: Mapping[str, LazyTensor], every: bool) -> Iterator[str]:
    rows: dict[tuple, list[tuple[str, LazyTensor]]] = {}
    for name, tensor in tensors.items():
        pattern = name if every else _NUMBER.sub("*", name)
        rows.setdefault((pattern, tensor.shape, tensor.dtype.name), []).append((name, tensor))
    for (pattern, shape, dtype), row in rows.items():
        shown, times = (pattern, f" x {len(row)}") if len(row) > 1 else (row[0][0], "")
        yield f"  {shown} {list(shape)} {dtype}{times}, {sum(t.nbytes for _, t in row):,} bytes"


def _inspect_checkpoint(step: Path, every: bool) -> Iterator[str]:
    yield f"{step}: checkpoint of this project"
    yield from (f"  {line}" for line in json.dumps(read_json(step, CARD), indent=2).splitlines())
    for item in sorted(p for p in step.iterdir() if (p / "_METADATA").is_file()):
        leaves = stored_leaves(item)
        yield f"item {item.name}: {_total(leaves.values())}"
        yield from _listing(leaves, every)
