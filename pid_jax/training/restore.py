"""Where a run starts from, in this order:

1. the newest checkpoint of its own workdir that is not damaged: everything, so the same command
   goes on;
2. `config.resume`, another run's folder: everything;
3. `config.init_from`, any checkpoint: weights only, step 0;
4. scratch.

Frozen networks are read from their own source each time (`frozen_networks`).
"""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from pid_jax import config as config_lib
from pid_jax.errors import DamagedCheckpoint, UserError
from pid_jax.objectives.base import Objective
from pid_jax.parallel import multihost
from pid_jax.parallel.sharding import state_shardings
from pid_jax.training import checkpoint
from pid_jax.training.checkpoint import Checkpointer, with_shardings
from pid_jax.training.state import Params, TrainState
from pid_jax.training.weights import read_weights

logger = logging.getLogger(__name__)

FRESH_ADAPTERS = r"^lora/"  # a network without adapters gets fresh ones, which change nothing
FIXED_SECTIONS = ("objective", "model", "lora", "codec", "text", "param_dtype", "seed")
PREDICTION = "config.flow.prediction_type:"
# How, not what, is computed.
FREE = ("config.model.remat:", "config.model.pit_chunks:", "config.model.unroll:")


def initial_state(config: ConfigDict, objective: Objective, mesh: Mesh,
                  checkpointer: Checkpointer) -> tuple[TrainState, dict | None]:
    """The state to go on from, every leaf where the sharding rules put it.

    Returns:
      The state, and the state of the data iterator (None: start at the beginning).
    Raises:
      UserError: a checkpoint that is not this model's, or is further than `total_steps`.
    """
    abstract = objective.abstract_state
    shardings = state_shardings(abstract, mesh)
    abstract = with_shardings(abstract, shardings)
    folder, state, data_state = resumed(config, abstract, checkpointer)
    recorded = checkpoint.read_json(folder, checkpoint.CARD).get("frozen", {}) if folder else {}
    frozen, checkpointer.frozen_sources = frozen_networks(objective, abstract.frozen, recorded)
    if state is None:
        state = first_state(config, objective, abstract.params, shardings.replace(frozen={}))
    return state.replace(frozen=frozen), data_state


def first_state(config: ConfigDict, objective: Objective, abstract: Params,
                shardings: TrainState) -> TrainState:
    """A state at step 0, without its frozen networks: from `config.init_from` or from the seed."""
    if config.init_from:
        params = initial_weights(config, objective, abstract)
        return jax.jit(objective.start, out_shardings=shardings)(params)
    logger.info("starting from scratch with seed %d", config.seed)
    return jax.jit(lambda key: objective.init(key).replace(frozen={}), out_shardings=shardings)(
        jax.random.key(config.seed))


def resumed(config: ConfigDict, abstract: TrainState, checkpointer: Checkpointer
            ) -> tuple[Path | None, TrainState | None, dict | None]:
    """The folder of the checkpoint that goes on, its state, and that of the data; or Nones."""
    if checkpointer.steps():
        return newest_whole(config, abstract, checkpointer)
    if config.resume:
        folder = checkpoint.find_step_folder(config.resume)
        return folder, *resume(folder, config, abstract)
    return None, None, None


def newest_whole(config: ConfigDict, abstract: TrainState, checkpointer: Checkpointer
                 ) -> tuple[Path, TrainState, dict | None]:
    """The newest checkpoint of the run that is what was written; damaged newer ones step aside.

    Raises:
      DamagedCheckpoint: there is none.
    """
    damaged = []
    for step in reversed(checkpointer.steps()):
        folder = checkpointer.folder / str(step)
        try:
            state, data_state = resume(folder, config, abstract)
        except DamagedCheckpoint as error:
            logger.error("DAMAGED CHECKPOINT of step %d, looking for the one before: %s", step,
                         error)
            damaged.append(step)
            continue
        if damaged:
            logger.error("GOING BACK to step %d: the steps after it are done again", step)
            checkpointer.set_aside(damaged)
        return folder, state, data_state
    raise DamagedCheckpoint(f"all {len(damaged)} checkpoints in {checkpointer.folder} are damaged; "
                            "bring back a copy, or move the folder away to start anew")


def resume(folder: Path, config: ConfigDict, abstract: TrainState) -> tuple[TrainState, dict]:
    """Everything from one checkpoint, after checking that it belongs to this config."""
    with multihost.together(DamagedCheckpoint):
        saved = checkpoint.read_config(folder)
    changed = [change for change in config_lib.differences(saved, config, FIXED_SECTIONS)
               if not change.startswith(FREE)]
    if changed:
        raise UserError(f"the checkpoint {folder} was written with another config: "
                        f"{'; '.join(changed[:3])}; use another --workdir, or set "
                        "config.init_from to start new training from its weights")
    if int(folder.name) > config.total_steps:
        raise UserError(f"the checkpoint {folder} is of step {folder.name}, past "
                        f"config.total_steps {config.total_steps}; raise it")
    for change in config_lib.differences(saved, config, tuple(sorted(config))):
        logger.info("changed since the checkpoint: %s", change)
    logger.info("resuming from %s", folder)
    state, data_state = checkpoint.restore_state(folder, abstract)
    return state, data_state or None  # a converted training state knows no place in our data


def initial_weights(config: ConfigDict, objective: Objective, abstract: Params) -> Params:
    """Weights of `config.init_from` (an average where there is one), the rest drawn fresh.

    Raises:
      UserError: parameters that neither side may lack; the first ones are named.
    """
    folder = checkpoint.find_step_folder(config.init_from)
    name = checkpoint.weights_item(folder)
    logger.info("starting from the %s weights of %s", name, folder)
    _warn_of_differences("config.init_from", folder, config)
    params, fresh = read_weights(folder, name, abstract, "config.init_from",
                                 (*objective.fresh_parameters, FRESH_ADAPTERS, *config.init_fresh),
                                 (*objective.unused_parameters, *config.init_unused),
                                 objective.source_paths)
    if fresh:
        logger.info("%d parameters are not in it and start fresh: %s", len(fresh), fresh)
        params = _fill(params, fresh, objective, abstract, config.seed)
    return params


def _warn_of_differences(key: str, folder: Path, config: ConfigDict) -> None:
    """Shapes do not tell all: flux and qwenimage networks have the same, rotary tables have none."""
    saved = checkpoint.read_config(folder)
    if saved.model.name == config.model.name:
        for change in config_lib.differences(saved, config, ("model", "codec", "text", "flow")):
            if not change.startswith("config.flow.") or change.startswith(PREDICTION):
                logger.warning("%s was made with another config: %s", key, change)


def frozen_networks(objective: Objective, abstract: dict[str, Params],
                    recorded: dict[str, dict]) -> tuple[dict[str, Params], dict[str, dict]]:
    """The networks that never change, and what the cards of the run say about them.

    Args:
      abstract: by name, with shardings.
      recorded: what the card of the checkpoint to resume says; the weights must be the same.
    Raises:
      UserError: a source is missing, holds another model, or other weights than recorded.
    """
    found, notes = {}, {}
    for name, source in objective.frozen_sources().items():
        found[name], notes[name] = _frozen_network(objective, name, source, abstract[name],
                                                   recorded.get(name))
    return found, notes


def _frozen_network(objective: Objective, name: str, source: str | None, abstract: Params,
                    recorded: dict | None) -> tuple[Params, dict]:
    key = f"config.distill.{name}"
    if source is None:
        logger.warning("%s is not set: the %s is drawn from the seed and knows nothing", key, name)
        places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        params = jax.jit(lambda rng: objective.init(rng).frozen[name], out_shardings=places)(
            jax.random.key(objective.config.seed))
        note = {"folder": None}
    else:
        folder = _frozen_folder(source, recorded)
        refuse_other_teacher(key, folder, objective.config)
        if source != objective.config.init_from:  # of which this is said already
            _warn_of_differences(key, folder, objective.config)
        params, _ = read_weights(folder, checkpoint.weights_item(folder), abstract, key,
                                 unused=(*objective.unused_parameters,
                                         *objective.config.init_unused))
        note = {"folder": str(folder)}
    note |= {"dtype": objective.config.distill.frozen_dtype,
             "fingerprint": int(fingerprint(params))}
    if recorded and recorded.get("dtype", note["dtype"]) != note["dtype"]:
        raise UserError(f"the {name} of this run was kept in {recorded['dtype']}; set config."
                        "distill.frozen_dtype to it, or use another --workdir")
    if recorded and recorded["fingerprint"] != note["fingerprint"]:
        raise UserError(f"the {name} of this run was {recorded['folder']}; {key} {source} holds "
                        "other weights; name the right checkpoint, or use another --workdir")
    return params, note


def refuse_other_teacher(key: str, folder: Path, config: ConfigDict) -> None:
    """Refuses a frozen network for what its shapes do not tell: latent family, what it predicts.

    Args: key: of the config, by which it was named.
    """
    saved = checkpoint.read_config(folder)
    if saved.codec.name != config.codec.name:
        raise UserError(f"{key} {folder} decodes {saved.codec.name} latents, but config.codec.name "
                        f"is {config.codec.name!r}; name a teacher of this family, or its codec")
    predicts, assumed = saved.flow.prediction_type, config.distill.teacher_prediction_type
    if predicts != assumed:
        raise UserError(f"{key} {folder} was trained to predict {predicts!r} "
                        f"(config.flow.prediction_type), but config.distill."
                        f"teacher_prediction_type is {assumed!r}; make them equal")


def _frozen_folder(source: str, recorded: dict | None) -> Path:
    """The step's folder that a run began with, or, where it is gone, what the config names now."""
    if recorded and recorded["folder"] and Path(recorded["folder"]).is_dir():
        return Path(recorded["folder"])
    return checkpoint.find_step_folder(source)


@jax.jit
def fingerprint(params: Params) -> jax.Array:
    """uint32 sum of the bits of all weights: the same on any number of devices."""
    def bits(leaf: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(leaf, f"uint{leaf.dtype.itemsize * 8}")
        return jnp.sum(words.astype(jnp.uint32), dtype=jnp.uint32)

    return sum(map(bits, jax.tree.leaves(params)), jnp.uint32(0))


def _fill(params: Params, paths: list[str], objective: Objective, abstract: Params,
          seed: int) -> Params:
    """Adds freshly drawn leaves; only they are computed."""
    def draw(key: jax.Array) -> dict[str, jax.Array]:
        everything = checkpoint.flat(objective.init(key).params)
        return {path: everything[path] for path in paths}

    places = checkpoint.flat(abstract)
    drawn = jax.jit(draw, out_shardings={path: places[path].sharding for path in paths})(
        jax.random.key(seed))
    return checkpoint.nested(checkpoint.flat(params) | drawn)
