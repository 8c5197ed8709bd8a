"""Jitted methods of an objective that take the codec's weights as an argument of their program."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from pid_jax.objectives.base import Objective
from pid_jax.parallel.mesh import replicated
from pid_jax.training.checkpoint import with_shardings


class CodecProgram:
    """`jax.jit` of a method that encodes. As a constant, each program would hold the codec anew.

    The weights lie on every device of the mesh; calling reads them once, lowering does not.
    """

    def __init__(self, objective: Objective, method: Callable[[Objective], Callable], mesh: Mesh,
                 in_shardings: tuple | None = None, donate: tuple[int, ...] = (), **options: Any):
        """Args:
          method: gives the function to jit, of an objective like this one.
          in_shardings, donate: of the function's own arguments; `options`: others of `jax.jit`.
        """
        if in_shardings is not None:
            options["in_shardings"] = (replicated(mesh), *in_shardings)
        self._objective, self._mesh = objective, mesh
        self._function = jax.jit(
            lambda weights, *inputs, **named: method(
                objective.with_codec_params(weights))(*inputs, **named),
            donate_argnums=tuple(number + 1 for number in donate), **options)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        weights = self._objective.codec_params(replicated(self._mesh))
        return self._function(weights, *inputs, **named)

    def lower(self, *inputs: Any) -> jax.stages.Lowered:
        """As of `jax.jit`."""
        shapes = self._objective.codec_shapes()
        places = jax.tree.map(lambda _: replicated(self._mesh), shapes)
        return self._function.lower(with_shardings(shapes, places), *inputs)
