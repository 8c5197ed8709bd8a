"""Orbax checkpoints: `workdir/checkpoints/<step>/` with one folder per item.

    params/  ema/      nested dicts of arrays; each loads without the others
    fake_score/ ...    networks that train beside it (distillation), each by its name
    optimizer/         the optimizer's state by path
    data/              state of the data iterator (JSON)
    config/  card/     resolved config and model card (JSON), which says where frozen networks
                       are: their weights are not written; and the checksums of all of it

Arrays are written in the background; a step's folder appears under its name when it is complete.
"""

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import traverse_util
from jax.sharding import Mesh
from ml_collections import ConfigDict

import pid_jax
from pid_jax import config as config_lib
from pid_jax.errors import (DamagedCheckpoint, RunFailed, TryAgain, UserError, one_line,
                            out_of_memory)
from pid_jax.parallel import multihost
from pid_jax.parallel.sharding import path_name, state_shardings
from pid_jax.training import checksums
from pid_jax.training.checksums import damaged, flat
from pid_jax.training.retention import Retention
from pid_jax.training.state import Params, TrainState
from pid_jax.training.storage import as_path, exists

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
PARAMS, OPTIMIZER, DATA, CONFIG, CARD = "params", "optimizer", "data", "config", "card"
DAMAGED_ADVICE = "move its folder away to go on from an earlier checkpoint"
RESERVED = (PARAMS, OPTIMIZER, DATA, CONFIG, CARD)


class Checkpointer:
    """Saves and restores the checkpoints of one run.

    Attributes:
      retention: which checkpoints stay, and the best one.
      frozen_sources: where the state's frozen networks came from; every card repeats it.
    """

    def __init__(self, workdir: Path, keep: int | Retention, place: str | None = None):
        """Opens `workdir/checkpoints`.

        Args:
          keep: what stays; a number: so many of the newest.
          place: folder or bucket that holds `checkpoints` instead of the workdir.
        """
        self.retention = Retention(keep) if isinstance(keep, int) else keep
        self._workdir = Path(workdir).absolute()
        self.folder = as_path(place or workdir) / FOLDER
        if exists(self.folder) and not self.folder.is_dir():
            raise UserError(f"{self.folder} is a file; remove it or choose another --workdir")
        # Folders are made in this thread: a workdir that cannot be written to fails at once
        # instead of leaving Orbax's threads waiting for a folder that never comes.
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self.retention, enable_async_checkpointing=True,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False))
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._pending: tuple[int, float] | None = None
        self._complete = self._manager.latest_step()
        self.frozen_sources: dict[str, dict] = {}
        self.retention.load(self._workdir, self._manager.all_steps())

    def latest_step(self) -> int | None:
        """The newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def set_aside(self, steps: Sequence[int]) -> None:
        """Renames damaged checkpoints, so that nothing is lost and their steps can be saved anew.

        Every process of a run must call it.
        """
        if not steps:
            return
        if multihost.is_writer():
            for step in steps:
                place = self.folder / f"damaged-{step}-{time.strftime('%Y%m%dT%H%M%S')}"
                (self.folder / str(step)).rename(place)
                logger.error("the damaged checkpoint of step %d is kept as %s", step, place)
        if jax.process_count() > 1:
            multihost.barrier("damaged checkpoints are set aside")
        self._manager.reload()
        self._complete = self._manager.latest_step()

    def save(self, state: TrainState, data_state: dict, config: ConfigDict,
             scores: Mapping[str, float] | None = None) -> None:
        """Starts writing; returns when the state may be overwritten.

        Args:
          scores: of the samples of this very step, where they were drawn.
        Raises:
          RunFailed: this or the previous save could not be written.
        """
        step = int(state.step)
        self.wait()
        if step == self.latest_step():
            return
        logger.info("saving the checkpoint of step %d", step)
        if multihost.is_writer():
            self.retention.offer(self._workdir, step, scores or {})
        self._pending = (step, time.monotonic())
        try:
            self._manager.save(step, force=True, args=_save_args(
                state, data_state, config, self.frozen_sources))
        except Exception as error:
            raise self._failure(error) from error

    def poll(self) -> None:
        """Logs the end of a save in the background, and raises if it failed."""
        if self._pending and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Blocks until the save in progress is complete.

        Raises:
          RunFailed: it could not be written.
        """
        if not self._pending:
            return
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._failure(error) from error
        step, started = self._pending
        self._pending, self._complete = None, step
        logger.info("saved the checkpoint of step %d in %.1f s", step, time.monotonic() - started)

    def close(self) -> None:
        """Waits for the last save, then ends the writer's threads."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(Exception):  # a failed save, which `wait` has reported
                self._manager.close()

    def _failure(self, error: Exception) -> RunFailed:
        step, _ = self._pending
        self._pending = None
        reason = one_line(error, 300)
        if multihost.lost_peer(error):
            return multihost.lost(f"while the checkpoint of step {step} was written", reason,
                                  self.last_good())
        # Orbax measures by the wall clock, so a clock that jumps looks like a save that hangs.
        kind = TryAgain if isinstance(error, TimeoutError) else RunFailed
        return kind(f"the checkpoint of step {step} could not be written to {self.folder}: "
                         f"{reason}; {self.last_good()}")

    def last_good(self) -> str:
        """The end of a sentence about a run that stops."""
        if self._complete is None:
            return "there is no complete checkpoint"
        return f"the newest complete checkpoint is of step {self._complete}"


def _save_args(state: TrainState, data_state: dict, config: ConfigDict,
               frozen_sources: dict[str, dict]) -> ocp.args.Composite:
    if clash := set(state.ema) & {*RESERVED, *state.companions}:
        raise UserError(f"an average cannot be called {', '.join(sorted(clash))}")
    arrays = array_items(state)
    texts = {DATA: data_state, CONFIG: json.loads(config_lib.to_json(config))}
    card = model_card(config, state) | {"frozen": frozen_sources}
    texts[CARD] = checksums.sealed(card, arrays, texts)
    return ocp.args.Composite(
        **{name: ocp.args.StandardSave(tree) for name, tree in arrays.items()},
        **{name: ocp.args.JsonSave(text) for name, text in texts.items()})


def array_items(state: TrainState) -> dict[str, Any]:
    """The items of arrays that a checkpoint holds: all of the state but its frozen networks."""
    return {PARAMS: state.params, OPTIMIZER: nested(flat(state.opt_state)), **state.ema,
            **state.companions}


def model_card(config: ConfigDict, state: TrainState) -> dict:
    """What the weights are, for people and for the commands that load them."""
    return {
        "format": 1,
        "pid_jax": pid_jax.__version__,
        "objective": config.objective,
        "model": config.model.name,
        "latent_family": config.codec.name,
        "text_encoder": config.text.name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "step": int(state.step),
        "averages": sorted(state.ema),
        "initialised_from": config.init_from,
    }


def nested(leaves: dict[str, Any]) -> dict:
    """Leaves by path -> nested dicts, free of the classes that the tree was made of."""
    return traverse_util.unflatten_dict(leaves, sep="/")


def like(tree: Any, leaves: dict[str, Any]) -> Any:
    """Leaves by path -> the structure of `tree`."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    return jax.tree_util.tree_unflatten(structure, [leaves[path_name(p)] for p, _ in paths])


def restore_state(step_folder: Path, abstract: TrainState) -> tuple[TrainState, dict]:
    """Reads a whole state.

    Args:
      step_folder: a complete checkpoint.
      abstract: shapes, dtypes and shardings of the state to make; the mesh may differ from the
        one that wrote the checkpoint.
    Returns:
      The state, without its frozen networks, and the state of the data iterator.
    Raises:
      UserError: the checkpoint holds another tree; the first differences are named.
    """
    wanted = array_items(abstract)
    with multihost.together(DamagedCheckpoint):
        card = read_json(step_folder, CARD)
        refuse_lost_items(step_folder, card)
        for name, tree in wanted.items():
            refuse_differences(step_folder, name, tree)
        found = {name: read_tree(step_folder, name, tree) for name, tree in wanted.items()}
        data_state = read_json(step_folder, DATA, card)
    for name, tree in found.items():
        checksums.refuse_damaged_arrays(step_folder, card, name, tree)
    step = jax.device_put(jax.numpy.asarray(int(step_folder.name), abstract.step.dtype),
                          abstract.step.sharding)
    state = TrainState(
        step=step, params=found[PARAMS],
        opt_state=like(abstract.opt_state, flat(found[OPTIMIZER])),
        ema={name: found[name] for name in abstract.ema},
        companions={name: found[name] for name in abstract.companions})
    return state, data_state


def refuse_lost_items(step_folder: Path, card: dict) -> None:
    """Raises DamagedCheckpoint when an item that the card lists is gone."""
    sums = card.get(checksums.KEY, {})
    lost = [name for kind in ("arrays", "texts") for name in sums.get(kind, ())
            if not (step_folder / name).is_dir()]
    if lost:
        raise damaged(step_folder, f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} gone")


def restore_tree(step_folder: Path, name: str, abstract: Any) -> Any:
    """Reads one item (`params`, or an average such as `ema`) with the shardings of `abstract`.

    Raises:
      DamagedCheckpoint: it is not what was written.
    """
    card = read_json(step_folder, CARD)
    tree = read_tree(step_folder, name, abstract)
    checksums.refuse_damaged_arrays(step_folder, card, name, tree)
    return tree


def read_tree(step_folder: Path, name: str, abstract: Any) -> Any:
    """The same without looking at checksums; processes need not come together."""
    handler = ocp.StandardCheckpointHandler()
    with _damage(step_folder, name):
        return handler.restore(step_folder / name, args=ocp.args.StandardRestore(abstract))


@contextlib.contextmanager
def _damage(step_folder: Path, name: str) -> Iterator[None]:
    """What Orbax raises about missing or altered files, of many types, as one sentence."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error) or multihost.lost_peer(error):
            raise
        reason = one_line(error, 200)
        raise damaged(step_folder, f"{name}: {reason}") from error


def saved_shapes(step_folder: Path, name: str) -> Any:
    """The tree of `jax.ShapeDtypeStruct` of an item, read without its arrays."""
    if not (step_folder / name).is_dir():
        held = sorted(p.name for p in step_folder.iterdir() if p.is_dir())
        raise UserError(f"the checkpoint {step_folder} holds no {name!r}; it holds "
                        f"{', '.join(held) or 'nothing'}; if it should, {DAMAGED_ADVICE}")
    with _damage(step_folder, name):
        tree = ocp.StandardCheckpointHandler().metadata(step_folder / name).tree
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def tree_differences(saved: Any, wanted: Any) -> tuple[list[str], list[str], list[str]]:
    """Paths that only `wanted` has, that only `saved` has, and `path: shape -> shape`."""
    old, new = _shapes(saved), _shapes(wanted)
    changed = [f"{path} {old[path]} -> {new[path]}"
               for path in sorted(old.keys() & new.keys()) if old[path] != new[path]]
    return sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys()), changed


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in flat(tree).items()}


def refuse_differences(step_folder: Path, name: str, wanted: Any) -> None:
    """Raises UserError with the first differences when an item is not the tree that is wanted."""
    missing, extra, changed = tree_differences(saved_shapes(step_folder, name), wanted)
    if missing or extra or changed:
        raise UserError(f"the checkpoint {step_folder} holds another model ({name}): "
                        f"{describe_differences(missing, extra, changed)}")


def describe_differences(missing: list[str], extra: list[str], changed: list[str]) -> str:
    """The first three of each kind of difference, with their counts."""
    parts = [(missing, "missing"), (extra, "not in this model"), (changed, "of another shape")]
    return "; ".join(f"{len(paths)} {what}: {_first_three(paths)}"
                     for paths, what in parts if paths)


def _first_three(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (" ..." if len(paths) > 3 else "")


def find_step_folder(path: str | Path) -> Path:
    """The checkpoint that `path` means: a workdir, its checkpoints folder or one step's folder.

    Raises:
      UserError: nothing is there, or no checkpoint in it is complete.
    """
    path = as_path(path)
    if not exists(path):
        raise UserError(f"there is no checkpoint at {path}: the path does not exist")
    if not path.is_dir():
        raise UserError(f"{path} is a file; expected a workdir, a checkpoints folder or the "
                        f"folder of one step")
    if (path / PARAMS).is_dir():
        if not path.name.isdigit():
            raise UserError(f"the checkpoint {path} was renamed; give its folder the number of its "
                            "step as name again")
        return path
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    steps = [p for p in folder.iterdir() if p.name.isdigit() and (p / PARAMS).is_dir()]
    if not steps:
        raise UserError(f"{path} holds no complete checkpoint; expected folders such as "
                        f"{FOLDER}/1000 written by pid_jax.main")
    return max(steps, key=lambda p: int(p.name))


def read_json(step_folder: Path, name: str, card: dict | None = None) -> dict:
    """A JSON item (`config`, `card`, `data`) of a checkpoint.

    Args:
      card: holds the checksum; None: the item is the card, or nothing is compared.
    """
    file = step_folder / name / "metadata"
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"the checkpoint {step_folder} has no readable {name}: {error}; "
                                f"{DAMAGED_ADVICE}") from error
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"the checkpoint {step_folder} has no readable {name}: it is a "
                                f"{type(content).__name__}; {DAMAGED_ADVICE}")
    if name == CARD:
        checksums.refuse_damaged_card(step_folder, content)
    if card:
        checksums.refuse_damaged_text(step_folder, card, name, content)
    return content


def read_config(step_folder: Path) -> ConfigDict:
    """The resolved config with which a checkpoint was written, by this or an earlier version."""
    card = read_json(step_folder, CARD)
    return config_lib.with_defaults(config_lib.from_dict(read_json(step_folder, CONFIG, card)))


def weights_item(step_folder: Path, which: str | None = None) -> str:
    """The item to take weights from: `which`, or `ema` where there is a whole one, or `params`."""
    if which or not (step_folder / "ema").is_dir():
        return which or PARAMS
    whole = saved_shapes(step_folder, PARAMS).keys() == saved_shapes(step_folder, "ema").keys()
    return "ema" if whole else PARAMS


def is_converted(step_folder: Path) -> bool:
    """Whether `tools.convert_torch_weights` made it: one set of weights, described by its card."""
    card = read_json(step_folder, CARD)
    return "source" in card and not card.get("training_state")


def load_for_inference(path: str | Path, which: str | None = None,
                       mesh: Mesh | None = None) -> tuple[ConfigDict, Params]:
    """Loads weights without the optimizer.

    Args:
      path: a workdir, its checkpoints folder (newest step) or one step's folder.
      which: `ema` (or another average's name) or `params`; None: see `weights_item`.
      mesh: places the weights by the sharding rules; default: all on the first device.
    Returns:
      The run's config and the nested dict of parameters as stored.
    Raises:
      UserError: no checkpoint there, or it does not hold `which`.
    """
    folder = find_step_folder(path)
    item = weights_item(folder, which)
    shapes = saved_shapes(folder, item)
    return read_config(folder), restore_tree(folder, item, placed(shapes, mesh))


def placed(shapes: Any, mesh: Mesh | None) -> Any:
    """Shapes with shardings: by the rules on a mesh, or everything on the first device."""
    if mesh is None:
        single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: single, shapes)
    else:
        shardings = state_shardings(shapes, mesh)
    return with_shardings(shapes, shardings)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """`jax.ShapeDtypeStruct`s that carry their shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes, shardings)
