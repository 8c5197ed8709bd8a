"""Where a run starts from, in this order:

1. the newest checkpoint of its own workdir: everything, so the same command goes on;
2. `config.resume`, another run's folder: everything;
3. `config.init_from`, any checkpoint: weights only, step 0;
4. scratch.
"""

import logging
import re
from pathlib import Path

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from pid_jax import config as config_lib
from pid_jax.errors import UserError
from pid_jax.objectives.base import Objective
from pid_jax.parallel.sharding import state_shardings
from pid_jax.training import checkpoint
from pid_jax.training.checkpoint import Checkpointer, with_shardings
from pid_jax.training.state import Params, TrainState

logger = logging.getLogger(__name__)

FIXED_SECTIONS = ("objective", "model", "codec", "text", "param_dtype", "seed")


def initial_state(config: ConfigDict, objective: Objective, mesh: Mesh,
                  checkpointer: Checkpointer) -> tuple[TrainState, dict | None]:
    """The state to go on from, every leaf where the sharding rules put it.

    Returns:
      The state, and the state of the data iterator (None: start at the beginning).
    Raises:
      UserError: a checkpoint that is not this model's, or is further than `total_steps`.
    """
    key = jax.random.key(config.seed)
    abstract = jax.eval_shape(objective.init, key)
    shardings = state_shardings(abstract, mesh)
    abstract = with_shardings(abstract, shardings)
    if (step := checkpointer.latest_step()) is not None:
        return resume(checkpointer.folder / str(step), config, abstract)
    if config.resume:
        return resume(checkpoint.find_step_folder(config.resume), config, abstract)
    if config.init_from:
        params = initial_weights(config, objective, abstract.params)
        return jax.jit(objective.start, out_shardings=shardings)(params), None
    logger.info("starting from scratch with seed %d", config.seed)
    return jax.jit(objective.init, out_shardings=shardings)(key), None


def resume(folder: Path, config: ConfigDict, abstract: TrainState) -> tuple[TrainState, dict]:
    """Everything from one checkpoint, after checking that it belongs to this config."""
    saved = checkpoint.read_config(folder)
    if changed := list(config_lib.differences(saved, config, FIXED_SECTIONS)):
        raise UserError(f"the checkpoint {folder} was written with another config: "
                        f"{'; '.join(changed[:3])}; use another --workdir, or set "
                        "config.init_from to start new training from its weights")
    if int(folder.name) > config.total_steps:
        raise UserError(f"the checkpoint {folder} is of step {folder.name}, past "
                        f"config.total_steps {config.total_steps}; raise it")
    for change in config_lib.differences(saved, config, tuple(sorted(config))):
        logger.info("changed since the checkpoint: %s", change)
    logger.info("resuming from %s", folder)
    return checkpoint.restore_state(folder, abstract)


def initial_weights(config: ConfigDict, objective: Objective, abstract: Params) -> Params:
    """Weights of `config.init_from` (an average where there is one), the rest drawn fresh.

    Raises:
      UserError: parameters that neither side may lack; the first ones are named.
    """
    folder = checkpoint.find_step_folder(config.init_from)
    name = checkpoint.weights_item(folder)
    saved = checkpoint.saved_shapes(folder, name)
    missing, extra, changed = checkpoint.tree_differences(saved, abstract)
    fresh = [path for path in missing
             if any(re.search(pattern, path) for pattern in objective.fresh_parameters)]
    refused = sorted(set(missing) - set(fresh))
    if refused or extra or changed:
        raise UserError(f"config.init_from {config.init_from} holds another model: "
                        f"{checkpoint.describe_differences(refused, extra, changed)}")
    logger.info("starting from the %s weights of %s", name, folder)
    wanted = _without(abstract, fresh)
    params = checkpoint.restore_tree(folder, name, wanted)
    if fresh:
        logger.info("%d parameters are not in it and start fresh: %s", len(fresh), fresh)
        params = _fill(params, fresh, objective, abstract, config.seed)
    return params


def _without(tree: Params, paths: list[str]) -> Params:
    return checkpoint.nested({path: leaf for path, leaf in checkpoint.flat(tree).items()
                              if path not in paths})


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
