"""PyTorch weights to a checkpoint folder of this project."""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from pid_jax.config import check_config, to_json
from pid_jax.errors import UserError, one_line
from pid_jax.files import atomic_write
from pid_jax.models import build_model, init_parameters
from pid_jax.training.checkpoint import CARD, CONFIG, DATA, FOLDER, PARAMS
from tools.convert_torch_weights import card as cards
from tools.convert_torch_weights.assembly import assembled_leaves
from tools.convert_torch_weights.layout import read_layout
from tools.convert_torch_weights.mappings import Table
from tools.convert_torch_weights.mappings.engine import flatten
from tools.convert_torch_weights.matching import Exceptions, Match, check_finite, match
from tools.convert_torch_weights.orbax_io import write_step
from tools.convert_torch_weights.readers import LazyTensor, open_source
from tools.convert_torch_weights.readers.tensors import TORCH_DTYPES
from tools.convert_torch_weights.recognise import recognise
from tools.convert_torch_weights.settings import (
    config_of_file, config_of_model, fitting_configs, model_options, refuse_family, table_of)
from tools.convert_torch_weights.training_state import (projector_of, read_training_state,
                                                        with_projector)

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Request:
    """What to convert.

    Attributes:
      src, dst: weight file or folder, and the folder to make.
      model, config: exactly one; a network's name, or a config file.
      changes: key -> value of `--set`.
      which: part of the source; None for the average where there is one.
      dtype: of the result; None for the source's own where it is one of DTYPES.
      overwrite: replace a folder that an earlier conversion made.
      allowed: keys that may start fresh or be left out.
      training_state: also the average and the optimizer, for `config.resume`.
    """

    src: str
    dst: Path
    model: str | None = None
    config: str | None = None
    changes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    which: str | None = None
    dtype: str | None = None
    overwrite: bool = False
    allowed: Exceptions = Exceptions()
    training_state: bool = False


def convert(request: Request) -> dict:
    """Converts weights; the destination appears complete or not at all.

    Returns:
      The model card.
    Raises:
      UserError: unreadable source, weights that are not the network of the config, values that are
        not finite, a destination that exists.
    """
    refuse_destination(request.dst, request.overwrite)
    source = open_source(request.src)
    layout = read_layout(source)
    part, tensors = layout.choose(request.which)
    config = _config(request, {**tensors, **projector_of(layout)} if request.training_state
                     else tensors)
    table = _table(request.src, config)
    tensors = with_projector(table, layout, tensors)
    refuse_family(request.src, config, {key: tensor.shape for key, tensor in tensors.items()})
    matched = match(source.path, table, tensors, request.allowed,
                    lambda: _hint(tensors))
    dtype = _dtype(request.dtype, matched.tensors)
    config.param_dtype = dtype.name
    check_config(config)
    not_finite: list[str] = []
    step, items = 0, {PARAMS: _leaves(table, config, matched, dtype, not_finite)}
    texts = {CONFIG: json.loads(to_json(config))}
    card = cards.make_card(config, table, source, layout, part, matched)
    if request.training_state:
        state = read_training_state(source, layout, table, dtype, not_finite)
        step, items, texts = state.step, state.items, texts | {DATA: {}}
        card |= {"training_state": True, "step": step, "averages": ["ema"]}
    with replacing(request.dst.resolve()) as folder:
        _write(folder / FOLDER / str(step), items, texts | {CARD: card})
        check_finite(source.path, not_finite)
        with atomic_write(folder / cards.FILE_NAME) as file:
            json.dump(card, file, indent=2)
    return card


def _write(folder: Path, items: Mapping[str, Mapping[str, LazyTensor]],
           texts: Mapping[str, dict]) -> None:
    """Writes a step; what Orbax says of a disk that fails is an OSError, as elsewhere."""
    try:
        write_step(folder, items, texts)
    except UserError:
        raise
    except ValueError as error:
        reason = one_line(error, 300)
        raise OSError(f"the checkpoint could not be written: {reason}") from error


def _config(request: Request, tensors: Mapping[str, LazyTensor]) -> ConfigDict:
    if request.config:
        return config_of_file(request.config, request.changes)
    shapes = {key: tensor.shape for key, tensor in tensors.items()}
    return config_of_model(request.src, request.model, shapes, request.changes)


def _table(src: str, config: ConfigDict) -> Table:
    """The table of the config's network. Sizes that a forged file claims need not make one."""
    try:
        return table_of(config)
    except (UserError, ArithmeticError, TypeError, ValueError) as error:
        raise UserError(f"{src}: the network of the config, whose options may come from the shapes "
                        f"of the weights, cannot be built: {one_line(error)}"
                        ) from error


def _hint(tensors: Mapping[str, LazyTensor]) -> str:
    shapes = {key: tensor.shape for key, tensor in tensors.items()}
    return fitting_configs(recognise(shapes), shapes)


def _dtype(wanted: str | None, tensors: Mapping[str, LazyTensor]) -> np.dtype:
    """The wanted dtype, or bfloat16 when every tensor has it, or float32."""
    held = {tensor.dtype.name for tensor in tensors.values()}
    return TORCH_DTYPES[wanted or ("bfloat16" if held == {"bfloat16"} else "float32")]


def _leaves(table: Table, config: ConfigDict, matched: Match, dtype: np.dtype,
            not_finite: list[str]) -> dict[str, LazyTensor]:
    made = assembled_leaves(table, matched.tensors, dtype, not_finite)
    fresh = [path for path in table.leaves if path not in made]
    drawn = _draw(config, fresh, dtype) if fresh else {}
    return {path: made.get(path) or drawn[path] for path in table.leaves}


def _draw(config: ConfigDict, paths: list[str], dtype: np.dtype) -> dict[str, LazyTensor]:
    """Fresh parameters by the network's own initialisation; only the wanted ones are computed."""
    name, options = model_options(config)
    net = build_model(name, **options)

    def wanted(key: jax.Array) -> dict[str, jax.Array]:
        everything = dict(flatten(init_parameters(net, key)))
        return {path: everything[path] for path in paths}

    drawn = jax.device_get(jax.jit(wanted)(jax.random.key(config.seed)))
    return {path: LazyTensor(path, dtype, value.shape, lambda value=value: value.astype(dtype))
            for path, value in drawn.items()}


def refuse_destination(dst: Path, overwrite: bool) -> None:
    """Raises UserError when `dst` may not be written: it exists, or is not a converted folder."""
    def written() -> set[Path]:
        found = cards.read_card(dst)
        return set() if found is None else {
            dst / cards.FILE_NAME, dst / FOLDER, dst / FOLDER / str(found.get("step"))}

    refuse_existing(dst, overwrite, cards.FILE_NAME, written)


def refuse_existing(dst: Path, overwrite: bool, card: str,
                    written: Callable[[], set[Path]]) -> None:
    """Raises UserError unless `dst` is free, or may be overwritten and holds a conversion only.

    Args:
      card: the file that every conversion of this kind writes.
      written: all that such a conversion writes to `dst`; nothing when `dst` is none.
    """
    if not dst.exists() or (dst.is_dir() and not any(dst.iterdir())):
        return
    if not overwrite:
        raise UserError(f"{dst} exists; choose another --dst, or add --overwrite to replace it")
    known = written()
    if dst / card not in known or not (dst / card).is_file():
        raise UserError(f"{dst} was not made by a conversion (it has no {card}), so it is not "
                        "overwritten; remove it yourself or choose another --dst")
    if foreign := sorted({*dst.iterdir(), *(dst / FOLDER).glob("*")} - known):
        raise UserError(f"{dst} holds what no conversion wrote ({foreign[0].relative_to(dst)}), so "
                        "it is not overwritten; move that away or choose another --dst")


@contextlib.contextmanager
def replacing(dst: Path) -> Iterator[Path]:
    """A new folder beside `dst` that takes its place on success and is removed on failure."""
    made = [folder for folder in dst.parents if not folder.exists()]
    dst.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{dst.name}.", suffix=".part", dir=dst.parent,
                                         ignore_cleanup_errors=True) as work:
            new = Path(work) / "new"
            new.mkdir()
            yield new
            _swap(new, dst, Path(work) / "old")
    except BaseException:
        with contextlib.suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


def _swap(new: Path, dst: Path, old: Path) -> None:
    """`new` takes the place of `dst`, which goes to `old`; should that fail, it comes back."""
    if not dst.exists():
        os.replace(new, dst)
        return
    os.replace(dst, old)
    try:
        os.replace(new, dst)
    except OSError:
        os.replace(old, dst)
        raise
