"""The training loop: mesh, objective, data, state, then steps with their hooks, in this order."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from pid_jax import objectives
from pid_jax.config import check_config
from pid_jax.data import pipeline
from pid_jax.errors import RunInterrupted
from pid_jax.objectives.base import Objective
from pid_jax.parallel import mesh as mesh_lib
from pid_jax.training import metrics as metrics_lib
from pid_jax.training import restore
from pid_jax.training import workdir as workdir_lib
from pid_jax.training.checkpoint import Checkpointer
from pid_jax.training.interruption import Interruption, catch_signals
from pid_jax.training.sampling_hooks import Sampler
from pid_jax.training.state import TrainState

logger = logging.getLogger(__name__)


def run(config: ConfigDict, workdir: str | None) -> TrainState:
    """Trains as the config says; running it again goes on from the newest checkpoint.

    Raises:
      UserError: bad input, found before anything compiles wherever that is possible.
      RunFailed: the loss is not finite, or a checkpoint could not be written.
      RunInterrupted: a signal came; the state was saved.
    """
    check_config(config)
    folder = workdir_lib.open_workdir(workdir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(workdir_lib.logging_to(folder))

        # Mesh and objective: every check that needs no data.
        mesh = mesh_lib.make_mesh(config.mesh, config.data.batch_size, config.optim.accumulate)
        objective = objectives.build(config)

        # Data.
        ...

        # State: own checkpoint, config.resume, config.init_from, scratch.
        checkpointer = Checkpointer(folder, config.checkpoint.keep)
        stack.callback(checkpointer.close)
        state, data_state = restore.initial_state(config, objective, mesh, checkpointer)
        workdir_lib.write_config(folder, config)
        ...
