"""Evaluates a traced program with its loops written out, for converters that cannot nest them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

# Calls that are evaluated in place: primitive -> parameter that holds the called program.
CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr",
         "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


class LoopFree:
    """An evaluator of closed jaxprs that keeps the outermost loops and unrolls those in them.

    Every slice of a constant that an unrolled loop reads is made once, on the host, whatever the
    number of its readers: the weights of a stack of blocks become one array per block.
    """

    def __init__(self):
        self._slices: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, program: core.ClosedJaxpr, arguments: Sequence[Any],
                 in_loop: bool = False) -> list[Any]:
        """The results of `program`; arguments and constants that are numpy arrays stay constant."""
        return self._run(program.jaxpr, [np.asarray(c) if isinstance(c, jax.Array) else c
                                         for c in program.consts], arguments, in_loop)

    def _run(self, jaxpr: core.Jaxpr, constants: Sequence[Any], arguments: Sequence[Any],
             in_loop: bool) -> list[Any]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments)))

        def read(variable: Any) -> Any:
            return variable.val if isinstance(variable, core.Literal) else values[variable]

        for equation in jaxpr.eqns:
            found = self._equation(equation, [read(v) for v in equation.invars], in_loop)
            values.update(zip(equation.outvars, found))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, equation: core.JaxprEqn, inputs: list[Any], in_loop: bool) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name == "scan":
            return (self._unrolled if in_loop else self._kept)(equation, inputs)
        if name in CALLS:
            called = params[CALLS[name]]
            if isinstance(called, core.ClosedJaxpr):
                return self(called, inputs, in_loop)
            return self._run(called, (), inputs, in_loop)
        if name == "stack":
            return [_stacked(inputs, params["axis"])]
        if name == "concatenate":
            return [_joined(inputs, params["dimension"])]
        found = equation.primitive.bind(*inputs, **params)
        return found if equation.primitive.multiple_results else [found]

    def _kept(self, loop: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """An outermost loop, as a `while`, whose parts converters know whatever the JAX."""
        program, length, reverse = (loop.params[name] for name in ("jaxpr", "length", "reverse"))
        constants, carry, rows = _loop_parts(loop, inputs)
        columns = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in loop.outvars[len(carry):]]

        def body(state: tuple) -> tuple:
            turn, carry, columns = state
            at = length - 1 - turn if reverse else turn
            row = [_read(leaf, at) for leaf in rows]
            out = self(program, [*constants, *carry, *row], in_loop=True)
            columns = [_written(column, found, at)
                       for column, found in zip(columns, out[len(carry):], strict=True)]
            return turn + 1, out[:len(carry)], columns

        start = (np.int32(0), carry, columns)
        _, carry, columns = lax.while_loop(lambda state: state[0] < length, body, start)
        return [*carry, *columns]

    def _unrolled(self, loop: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """A loop inside a loop, turn after turn."""
        params = loop.params
        constants, carry, rows = _loop_parts(loop, inputs)
        turns = range(params["length"])
        found = {}
        for turn in reversed(turns) if params["reverse"] else turns:
            row = [self._slice(leaf, turn) for leaf in rows]
            out = self(params["jaxpr"], [*constants, *carry, *row], in_loop=True)
            carry, found[turn] = out[:len(carry)], out[len(carry):]
        columns = zip(*(found[turn] for turn in turns))
        return [*carry, *(_stacked(column, 0) for column in columns)]

    def _slice(self, leaf: Any, turn: int) -> Any:
        if not isinstance(leaf, np.ndarray):
            return lax.index_in_dim(leaf, turn, keepdims=False)
        key = (id(leaf), turn)
        if key not in self._slices:  # the whole array is kept, so that its id stays its own
            self._slices[key] = (leaf, np.array(leaf[turn]))
        return self._slices[key][1]


def _loop_parts(loop: core.JaxprEqn, inputs: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """What a loop reads in every turn, carries from turn to turn, and reads row by row.

    Told by shapes, since a scan's parameters differ from one JAX to the next: what is read or
    written row by row has one axis more outside the loop than in it.
    """
    body = loop.params["jaxpr"].jaxpr
    rows, carried = (sum(outer.aval.ndim == inner.aval.ndim + extra for outer, inner in pairs)
                     for pairs, extra in ((zip(loop.invars, body.invars), 1),
                                          (zip(loop.outvars, body.outvars), 0)))
    second = len(inputs) - rows
    first = second - carried
    return inputs[:first], inputs[first:second], inputs[second:]


# The two below are without the nested calls in which `jax.lax` wraps its shorter forms.


def _read(leaf: jax.Array, at: jax.Array) -> jax.Array:
    """leaf[at]."""
    row = lax.dynamic_slice(leaf, _row_start(leaf, at), (1, *leaf.shape[1:]))
    return lax.squeeze(row, (0,))


def _written(column: jax.Array, found: jax.Array, at: jax.Array) -> jax.Array:
    """`column` with column[at] = found."""
    return lax.dynamic_update_slice(column, lax.expand_dims(found, (0,)), _row_start(column, at))


def _row_start(leaf: jax.Array, at: jax.Array) -> tuple:
    return at, *[np.int32(0)] * (leaf.ndim - 1)


def _stacked(parts: Sequence[Any], axis: int) -> Any:
    return _joined([lax.expand_dims(part, (axis,)) for part in parts], axis)


def _joined(parts: Sequence[Any], axis: int) -> Any:
    """Joins along an axis; parts of length 0, which ONNX reads as unknown, are left out."""
    parts = [part for part in parts if part.shape[axis] != 0]
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, axis)
