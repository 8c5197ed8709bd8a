"""FLOPs of a function, counted in its traced program: no formula per model to keep in step.

One multiply-accumulate is two FLOPs; matrix products and convolutions count, elementwise work does
not (as PyTorch's FlopCounterMode counts). Loops with a known length count every turn, which XLA's
own `cost_analysis` does not. Tracing is abstract: a 4096-pixel network costs a second, no memory.

Trace networks with `counted_attention` and `remat="none"`: attention then shows apart, kernels
that a trace cannot see into do not appear, and recomputation does not count.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import Mesh

from pid_jax.errors import UserError
from pid_jax.models.attention import dense_attention

# Dense bfloat16 FLOP/s of one JAX device, from the vendors' data sheets.
PEAK_FLOPS = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5": 459e12, "TPU v5p": 459e12,
    "TPU v6 lite": 918e12, "TPU7x": 1153.5e12,
    "NVIDIA A100": 312e12, "NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA B200": 2250e12}


class Flops(NamedTuple):
    """Floating-point operations; `attention` is the two products of softmax attention."""

    matmul: float = 0.0
    attention: float = 0.0

    @property
    def total(self) -> float:
        """Both kinds."""
        return self.matmul + self.attention

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.matmul + other.matmul, self.attention + other.attention)

    def times(self, count: float) -> "Flops":
        """The operations of `count` turns."""
        return Flops(self.matmul * count, self.attention * count)


@jax.jit
def counted_attention(q, k, v, text_q=None, text_k=None, text_v=None, key_mask=None):
    """Dense attention under a name that the counter knows; inject it into the network to count."""
    return dense_attention(q, k, v, text_q, text_k, text_v, key_mask)


ATTENTION = counted_attention.__name__


def count_flops(function: Callable, *args: Any, **kwargs: Any) -> Flops:
    """FLOPs of `function(*args, **kwargs)`; arguments may be `jax.ShapeDtypeStruct` trees.

    What does not reach the result is not counted.
    Raises:
      UserError: a loop of unknown length or a kernel whose work the trace does not show.
    """
    traced = jax.make_jaxpr(function)(*args, **kwargs).jaxpr
    needed, _ = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    return _count(needed, in_attention=False)


def _count(jaxpr: core.Jaxpr, in_attention: bool) -> Flops:
    return sum((_count_equation(eqn, in_attention) for eqn in jaxpr.eqns), Flops())


def _count_equation(eqn: core.JaxprEqn, in_attention: bool) -> Flops:
    name = eqn.primitive.name
    if name in PRODUCTS:
        work = float(PRODUCTS[name](eqn))
        return Flops(attention=work) if in_attention else Flops(matmul=work)
    if name in KERNELS:
        raise UserError(f"the work of {name!r} cannot be counted; trace the network with "
                        "counted_attention")
    in_attention = in_attention or eqn.params.get("name") == ATTENTION
    counts = [_count(jaxpr, in_attention) for jaxpr in core.jaxprs_in_params(eqn.params)]
    if name == "cond":
        return max(counts, key=lambda flops: flops.total)
    return sum(counts, Flops()).times(_turns(eqn, counts))


def _turns(eqn: core.JaxprEqn, counts: list[Flops]) -> int:
    """How often an equation runs what is inside it, over all devices."""
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
    if eqn.primitive.name == "shard_map":
        return eqn.params["mesh"].size
    if eqn.primitive.name == "while" and any(flops.total for flops in counts):
        raise UserError("a while loop of unknown length holds matrix products; their number "
                        "cannot be counted")
    return 1


def _dot_flops(eqn: core.JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    return 2 * math.prod(eqn.outvars[0].aval.shape) * depth


def _convolution_flops(eqn: core.JaxprEqn) -> int:
    """Products with the zeros that a strided convolution's gradient dilates by are left out."""
    kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
    _, depth, *space = (kernel[axis] for axis in numbers.rhs_spec)
    products = 2 * math.prod(eqn.outvars[0].aval.shape) * depth * math.prod(space)
    return products // math.prod(eqn.params["lhs_dilation"])


PRODUCTS = {"dot_general": _dot_flops, "conv_general_dilated": _convolution_flops}
KERNELS = ("pallas_call", "custom_call", "ffi_call", "dot_product_attention_fwd_wrapper",
           "dot_product_attention_bwd_wrapper")


def peak_flops(device: jax.Device) -> float | None:
    """bfloat16 peak of a device in FLOP/s; None for a CPU or an unknown chip."""
    kind = device.device_kind
    known = [name for name in PEAK_FLOPS if kind == name or kind.startswith(name + " ")]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def mesh_peak(mesh: Mesh) -> float | None:
    """The peak of all devices of a mesh together; None when it is not known."""
    peak = peak_flops(mesh.devices.flat[0])
    return None if peak is None else peak * mesh.size
