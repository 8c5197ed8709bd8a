"""A converted (or trained) checkpoint back to PyTorch's names and layouts."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pid_jax.errors import UserError
from pid_jax.files import atomic_write
from pid_jax.training.checkpoint import PARAMS, find_step_folder, read_config, saved_shapes
from tools.convert_torch_weights.assembly import entries_by_leaf
from tools.convert_torch_weights.mappings import Table
from tools.convert_torch_weights.mappings.engine import Entry
from tools.convert_torch_weights.orbax_io import stored_leaves
from tools.convert_torch_weights.readers import LazyTensor
from tools.convert_torch_weights.safetensors_writer import write_safetensors
from tools.convert_torch_weights.settings import table_of
from tools.convert_torch_weights.torch_writer import write_torch_zip

ENDINGS = (".safetensors", ".pth")


def export(folder: Path, dst: Path, prefix: str = "", which: str | None = None,
           overwrite: bool = False) -> int:
    """Writes a checkpoint as a PyTorch weight file.

    Args:
      folder: converted folder, workdir, or one step of it.
      dst: file to make, `.safetensors` or `.pth`.
      prefix: put before every name, such as "net.".
      which: "params", or an average such as "ema"; None for the average where there is one.
      overwrite: replace `dst`.
    Returns:
      The number of tensors.
    """
    if dst.suffix not in ENDINGS:
        raise UserError(f"--dst {dst} ends in {dst.suffix!r}; expected one of {', '.join(ENDINGS)}")
    if dst.exists() and not overwrite:
        raise UserError(f"{dst} exists; choose another --dst, or add --overwrite to replace it")
    table, leaves = open_checkpoint(folder, which)
    tensors = [*torch_tensors(table, leaves, prefix), *constant_tensors(table, prefix)]
    with atomic_write(dst, "wb") as file:
        if dst.suffix == ".pth":
            write_torch_zip(file, tensors)
        else:
            write_safetensors(file, tensors, {"format": "pt"})
    return len(tensors)


def open_checkpoint(folder: Path, which: str | None = None
                    ) -> tuple[Table, dict[str, LazyTensor]]:
    """The table of a checkpoint's network and its stored parameters by path.

    Raises:
      UserError: no checkpoint there, or its arrays are not those of its config.
    """
    step = find_step_folder(folder)
    item = which or ("ema" if (step / "ema").is_dir() else PARAMS)
    saved_shapes(step, item)  # refuses an item that is not there
    table, leaves = table_of(read_config(step)), stored_leaves(step / item)
    expected = {path: tuple(leaf.shape) for path, leaf in table.leaves.items()}
    averaged = {path.split("/")[0] for path in leaves}
    if averaged < {path.split("/")[0] for path in expected}:  # what does not train has no average
        leaves |= {path: leaf for path, leaf in stored_leaves(step / PARAMS).items()
                   if path.split("/")[0] not in averaged}
    found = {path: leaf.shape for path, leaf in leaves.items()}
    if expected != found:
        wrong = sorted(path for path in expected.keys() | found.keys()
                       if expected.get(path) != found.get(path))
        raise UserError(f"the arrays of {step} are not those of its config; they differ in "
                        f"{', '.join(wrong)}")
    return table, leaves


def constant_tensors(table: Table, prefix: str = "") -> Iterator[LazyTensor]:
    """The tensors that PyTorch stores and this project computes, float32."""
    for key, make in table.constants.items():
        value = make()
        yield LazyTensor(f"{prefix}{key}", value.dtype, value.shape, make)


def torch_tensors(table: Table, leaves: dict[str, LazyTensor], prefix: str = ""
                  ) -> Iterator[LazyTensor]:
    """The PyTorch tensors of stored parameters; reading them in order reads each leaf once."""
    held: dict[str, np.ndarray] = {}

    def pick(entry: Entry) -> np.ndarray:
        if entry.path not in held:
            held.clear()
            held[entry.path] = leaves[entry.path].read()
        return np.asarray(entry.pick(held[entry.path]), order="C")

    for path, entries in entries_by_leaf(table).items():
        for entry in entries:
            yield LazyTensor(f"{prefix}{entry.key}", leaves[path].dtype, tuple(entry.shape),
                             lambda entry=entry: pick(entry))
