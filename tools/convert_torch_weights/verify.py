"""Compares a PyTorch source with a converted checkpoint, tensor by tensor, bit by bit."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pid_jax.errors import UserError
from pid_jax.training.checkpoint import CARD, find_step_folder, read_json
from tools.convert_torch_weights.export import open_checkpoint, torch_tensors
from tools.convert_torch_weights.layout import counted, read_layout
from tools.convert_torch_weights.readers import LazyTensor, open_source
from tools.convert_torch_weights.training_state import with_projector


def verify(src: str, folder: Path, which: str | None = None) -> int:
    """Checks that every tensor of both sides is the same number for number.

    Source values are cast to the checkpoint's dtype first, as the conversion does. Keys that the
    model card lists as fresh or left out are not compared.

    Returns:
      The number of tensors compared.
    Raises:
      UserError: the first difference, with its place and both values.
    """
    layout = read_layout(open_source(src))
    card = read_json(find_step_folder(folder), CARD)
    part, tensors = layout.choose(which or card.get("weights"))
    fresh, left_out = set(card.get("fresh", ())), set(card.get("left_out", {}).get("keys", ()))
    table, leaves = open_checkpoint(folder)
    tensors, ours = with_projector(table, layout, tensors), list(torch_tensors(table, leaves))
    _compare_names(tensors.keys() - left_out, {t.name for t in ours} - fresh, part, folder)
    compared = [tensor for tensor in ours if tensor.name not in fresh]
    for tensor in compared:
        _compare(tensors, tensor)
    return len(compared)


def _compare_names(source: set[str], ours: set[str], part: str, folder: Path) -> None:
    if only := sorted(source - ours):
        raise UserError(f"{only[0]} is in the source's {part} weights and not in {folder}; "
                        f"{counted(len(only))} so")
    if only := sorted(ours - source):
        raise UserError(f"{only[0]} is in {folder} and not in the source's {part} weights; "
                        f"{counted(len(only))} so")


def _compare(source: Mapping[str, LazyTensor], ours: LazyTensor) -> None:
    theirs = source[ours.name]
    if theirs.shape != ours.shape:
        raise UserError(f"{ours.name} has shape {list(theirs.shape)} in the source and "
                        f"{list(ours.shape)} in the checkpoint")
    expected, found = theirs.read().astype(ours.dtype, copy=False), ours.read()
    bits = np.dtype(f"u{ours.dtype.itemsize}")
    different = np.asarray(expected, order="C").view(bits) != found.view(bits)
    if different.any():
        place = np.unravel_index(np.argmax(different), different.shape)
        raise UserError(
            f"{ours.name}{[int(i) for i in place]} is {expected[place]!r} in the source and "
            f"{found[place]!r} in the checkpoint; {int(different.sum())} of {different.size} "
            "values of this tensor differ")
