"""A whole Lightning training checkpoint: weights, average, projector and AdamW's moments.

Its optimizer numbers parameters in the order of the denoiser's, then the projector's.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from pid_jax.errors import UserError
from pid_jax.models import repa
from pid_jax.training.checkpoint import OPTIMIZER, PARAMS
from tools.convert_torch_weights.assembly import assembled_leaves
from tools.convert_torch_weights.layout import EMA, NET, OTHER, PROJECTOR, Layout
from tools.convert_torch_weights.mappings import Table
from tools.convert_torch_weights.matching import Exceptions, match
from tools.convert_torch_weights.readers import LazyTensor, Source

_LIGHTNING_PREFIX = "proj.0."
_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_STATE = "0.state."

Tensors = Mapping[str, LazyTensor]


@dataclasses.dataclass(frozen=True)
class TrainingState:
    """Attributes: step, updates done; items, checkpoint item -> parameter path -> leaf."""

    step: int
    items: Mapping[str, Mapping[str, LazyTensor]]


def with_projector(table: Table, layout: Layout, tensors: Tensors) -> dict[str, LazyTensor]:
    """The tensors, with the source's projector where the network of the table has one."""
    return dict(tensors) | {key: tensor for key, tensor in projector_of(layout).items()
                            if key in table.entries}


def projector_of(layout: Layout) -> dict[str, LazyTensor]:
    """The source's projector under the names of our tables ("repa_projector.0.weight")."""
    return {f"{repa.NAME}.{name.removeprefix(_LIGHTNING_PREFIX)}": tensor
            for name, tensor in layout.parts.get(PROJECTOR, {}).items()}


def read_training_state(source: Source, layout: Layout, table: Table, dtype: np.dtype,
                        not_finite: list[str]) -> TrainingState:
    """Every item of a checkpoint that training can go on from.

    Raises:
      UserError: the source lacks a part, or a part is not of the network of the table.
    """
    missing = [part for part in (NET, EMA) if part not in layout.parts]
    if missing or not any(name.startswith(_STATE) for name in layout.parts.get(OTHER, {})):
        raise UserError(f"{source.path} is no whole training state: it lacks "
                        f"{', '.join([*missing, 'optimizer_states'][:1])}; leave out "
                        "--training-state to convert its weights alone")
    check = lambda tensors: match(source.path, table, tensors, Exceptions()).tensors
    net = check(with_projector(table, layout, layout.parts[NET]))
    average = check(with_projector(table, layout, layout.parts[EMA]))
    leaves = lambda tensors, kind: assembled_leaves(table, tensors, kind, not_finite)
    moments = _moments(source, layout, net)
    optimizer = {f"adam/0/{ours}/{path}": dataclasses.replace(leaf, name=f"{ours}/{path}")
                 for ours in _MOMENTS
                 for path, leaf in leaves(check(moments[ours]), np.dtype(np.float32)).items()}
    updates = int(layout.parts[OTHER][f"{_STATE}0.step"].read())
    counters = {path: _counter(path, updates) for path in ("schedule_step", "adam/0/count")}
    return TrainingState(
        int(source.other.get("global_step", updates)),
        {PARAMS: leaves(net, dtype), "ema": leaves(average, np.dtype(np.float32)),
         OPTIMIZER: optimizer | counters})


def _moments(source: Source, layout: Layout, net: Tensors) -> dict[str, dict[str, LazyTensor]]:
    """Moment -> our torch key -> tensor, by the order of parameters in the file."""
    states = layout.parts[OTHER]
    order = [*layout.parts[NET], *(key for key in net if key.startswith(f"{repa.NAME}."))]
    count = len({name.split(".")[2] for name in states if name.startswith(_STATE)})
    if count != len(order):
        raise UserError(f"{source.path}: its optimizer holds {count} parameters, the network and "
                        f"its projector {len(order)}")
    return {ours: {key: states[f"{_STATE}{index}.{theirs}"] for index, key in enumerate(order)}
            for ours, theirs in _MOMENTS.items()}


def _counter(path: str, value: int) -> LazyTensor:
    return LazyTensor(path, np.dtype(np.int32), (), lambda: np.asarray(value, np.int32))
