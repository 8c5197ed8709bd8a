"""A run's checkpoint as the two files that the PyTorch trainings of JiT and DiTok write.

    checkpoint-STEP.pt   model: state dict, global_step
    ema-STEP.pt          ema_state_dict1, ema_state_dict2, ema_decay1, ema_decay2, global_step

Averages hold what trains (of DiTok the keys diffusion_decoder.*). The optimizer is not exported:
Adam's moments follow our layouts and a PyTorch training would start them anew.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from ml_collections import ConfigDict

from pid_jax.errors import UserError
from pid_jax.files import atomic_write
from pid_jax.training.checkpoint import PARAMS, find_step_folder, read_config
from tools.convert_torch_weights.assembly import entries_by_leaf
from tools.convert_torch_weights.export import constant_tensors, torch_tensors
from tools.convert_torch_weights.mappings import Table
from tools.convert_torch_weights.orbax_io import stored_leaves
from tools.convert_torch_weights.readers import LazyTensor
from tools.convert_torch_weights.settings import table_of
from tools.convert_torch_weights.torch_writer import Tree, write_torch_tree

AVERAGES = ("ema", "ema2")


def export_training(folder: Path, dst: Path, overwrite: bool = False) -> list[Path]:
    """Writes both files into the folder `dst`; returns their paths.

    Raises:
      UserError: no checkpoint there, one without two averages, or files that exist already.
    """
    step = find_step_folder(folder)
    config, number = read_config(step), int(step.name)
    if missing := [name for name in AVERAGES if not (step / name).is_dir()]:
        raise UserError(f"the checkpoint {step} holds no average {missing[0]!r}; this layout has "
                        "two: export it as a weight file instead")
    trees = {f"checkpoint-{number}.pt": _checkpoint(step, config),
             f"ema-{number}.pt": _averages(step, config)}
    paths = {dst / name: tree for name, tree in trees.items()}
    if not overwrite and (there := [path for path in paths if path.exists()]):
        raise UserError(f"{there[0]} exists; choose another --dst, or add --overwrite")
    for path, tree in paths.items():
        with atomic_write(path, "wb") as file:
            write_torch_tree(file, tree)
    return list(paths)


def _checkpoint(step: Path, config: ConfigDict) -> Tree:
    table = table_of(config)
    tensors = [*_tensors(table, stored_leaves(step / PARAMS)), *constant_tensors(table)]
    return {"model": _by_name(tensors), "global_step": int(step.name)}


def _averages(step: Path, config: ConfigDict) -> Tree:
    table, tree = table_of(config), {}
    for number, (name, decay) in enumerate(_decays(config).items(), 1):
        tree[f"ema_state_dict{number}"] = _by_name(_tensors(table, stored_leaves(step / name)))
        tree[f"ema_decay{number}"] = float(decay)
    return tree | {"global_step": int(step.name)}


def _decays(config: ConfigDict) -> dict[str, float]:
    """The decay of each of the two averages."""
    others = {name: value for name, kind, value in config.ema.others if kind == "constant"}
    if config.ema.decay is None or AVERAGES[1] not in others:
        raise UserError("this layout has two averages that decay constantly: ema (config.ema.decay) "
                        "and ema2 (in config.ema.others); export a weight file instead")
    return {AVERAGES[0]: config.ema.decay, AVERAGES[1]: others[AVERAGES[1]]}


def _tensors(table: Table, leaves: Mapping[str, LazyTensor]) -> Iterator[LazyTensor]:
    """The tensors of those parameters of the table that are stored."""
    held = {path for path in entries_by_leaf(table) if path in leaves}
    entries = {key: entry for key, entry in table.entries.items() if entry.path in held}
    return torch_tensors(Table(table.model, entries, table.leaves), dict(leaves))


def _by_name(tensors) -> dict[str, LazyTensor]:
    return {tensor.name: tensor for tensor in tensors}
