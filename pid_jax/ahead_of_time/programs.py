"""The programs that are compiled ahead of time: the training step, drawing, making the state."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from pid_jax import objectives, train
from pid_jax.errors import UserError
from pid_jax.flops import Flops, count_flops
from pid_jax.objectives.base import Objective
from pid_jax.objectives.pid_teacher import PidTeacher
from pid_jax.parallel.mesh import batch_sharding, replicated, single_device
from pid_jax.parallel.sharding import state_shardings
from pid_jax.training.checkpoint import with_shardings

PROGRAMS = ("train", "sample", "init")


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function with the shapes and places of its arguments.

    Attributes:
      function: what `jax.jit` returned.
      arguments: trees of `jax.ShapeDtypeStruct` with shardings.
      parts: the same arguments by kind, for the memory table.
    """

    function: Callable
    arguments: tuple
    parts: dict[str, Any]

    def compile(self) -> jax.stages.Compiled:
        """Lowers and compiles for the devices of the shardings."""
        return self.function.lower(*self.arguments).compile()


def build(config: ConfigDict, mesh: Mesh, program: str, height: int, width: int,
          tile: int = 0) -> Program:
    """The program `program` of a config on a mesh, for pictures of height x width.

    The batch is `config.data.batch_size`.

    Args:
      tile: side of the tiles of a decode, in pixels; 0: whole.
    """
    objective = objectives.build(config, mesh)
    objective.check_picture(height, width)
    if tile:
        return _drawing(objective, mesh, height, width, tile_options(objective, program, height,
                                                                     width, tile))
    make = {"train": _training_step, "sample": _drawing, "init": _initialising}[program]
    return make(objective, mesh, height, width)


def _training_step(objective: Objective, mesh: Mesh, height: int, width: int) -> Program:
    abstract = jax.eval_shape(objective.init, jax.random.key(0))
    state = with_shardings(abstract, state_shardings(abstract, mesh))
    batch = objective.batch_shapes(objective.config.data.batch_size, height, width)
    batch = _placed(batch, batch_sharding(mesh))
    parts = {"parameters": state.params, "optimizer": (state.step, state.opt_state),
             "averages": state.ema, "other networks": (state.companions, state.frozen),
             "batch": batch,
             "encoder": _placed(objective.codec_shapes(), replicated(mesh))}
    return Program(train.compile_step(objective, mesh, state, first_phase(objective)),
                   (state, batch), parts)


def first_phase(objective: Objective) -> str:
    """The phase that is compiled ahead of time: the first update's, the largest one."""
    return objective.phase(0)


def tile_options(objective: Objective, program: str, height: int, width: int, tile: int
                 ) -> dict[str, int]:
    """What a decode by tiles is given beside its arrays."""
    if program != "sample" or not isinstance(objective, PidTeacher):
        raise UserError("tiles belong to the decode of a PiD network: --program=sample")
    return {"tile": objective.tile_rows(tile, height, width)}


def _drawing(objective: Objective, mesh: Mesh, height: int, width: int,
             options_of_draw: Mapping[str, Any] = MappingProxyType({})) -> Program:
    """Guided drawing from noise: the whole solver, `config.sample.steps` steps."""
    params = objective.abstract_params
    params = with_shardings(params, state_shardings(params, mesh))
    draw_pictures, shapes = objective.drawing(objective.config.data.batch_size, height, width)
    inputs = _placed(shapes, batch_sharding(mesh))
    null_text = _placed(objective.text_shape(1), replicated(mesh))
    options = objective.config.sample
    table = objective.solver_table(height, width, options.steps)

    def draw(params: Any, inputs: dict, null_text: jax.Array) -> jax.Array:
        return draw_pictures(params, **inputs, null_text=null_text, table=table,
                             scale=options.guidance, **options_of_draw)

    function = jax.jit(draw, out_shardings=batch_sharding(mesh))
    return Program(function, (params, inputs, null_text),
                   {"parameters": params, "inputs": inputs})


def _initialising(objective: Objective, mesh: Mesh, height: int, width: int) -> Program:
    """A fresh state; its temporaries show whether anything exists undivided on the way."""
    key = _placed(jax.eval_shape(lambda: jax.random.key(0)), replicated(mesh))
    places = state_shardings(jax.eval_shape(objective.init, key), mesh)
    return Program(jax.jit(objective.init, out_shardings=places), (key,), {})


def _placed(shapes: Any, sharding: NamedSharding) -> Any:
    return with_shardings(shapes, jax.tree.map(lambda _: sharding, shapes))


def model_flops(config: ConfigDict, program: str, height: int, width: int) -> Flops:
    """FLOPs that the mathematics of a program needs: no recomputation, whatever `remat` says."""
    if program == "init":
        return Flops()
    objective = objectives.build(config)
    if program == "train":
        batch = objective.batch_shapes(config.data.batch_size, height, width)
        return objective.step_flops(batch, first_phase(objective))
    drawing = _drawing(objective.counting(), single_device(), height, width)
    return count_flops(drawing.function, *drawing.arguments)
