"""Sequence-parallel attention: image tokens divided over the mesh axis `sequence`, text whole.

One function covers all designs. The n devices of the axis form groups of u neighbours that trade
tokens for heads (all-to-all, DeepSpeed-Ulysses, arXiv 2309.14509) and n/u groups that gather keys
and values:
  ulysses            u = n; moves the least; n must divide the heads
  allgather          u = 1; the semantics of the reference's context parallelism
  ulysses_allgather  u = the largest divisor of n that divides the heads
Attention over the joint sequence [image, text] is exact in each of them, and so are gradients:
the collectives are transposed by JAX.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pid_jax.errors import UserError
from pid_jax.models.attention import Attention
from pid_jax.models.placement import MAP, ROWS, TEXT, TOKENS, Constrain, unconstrained
from pid_jax.parallel.kernels import Kernel, local_kernel
from pid_jax.parallel.mesh import BATCH_AXES

AXIS = "sequence"
DESIGNS = ("auto", "ulysses", "allgather", "ulysses_allgather")
# Trailing axes are whole. A key mask speaks of all tokens and is placed like text.
SPECS = {TOKENS: PartitionSpec(BATCH_AXES, AXIS), TEXT: PartitionSpec(BATCH_AXES),
         ROWS: PartitionSpec(BATCH_AXES, AXIS), MAP: PartitionSpec(BATCH_AXES)}


class Degrees(NamedTuple):
    """How the `sequence` axis is used: groups of `ulysses` devices, `gather` of them."""

    ulysses: int
    gather: int

    @property
    def heads_groups(self) -> list[list[int]]:
        """Axis indices that exchange tokens for heads: neighbours."""
        return [[g * self.ulysses + u for u in range(self.ulysses)] for g in range(self.gather)]

    @property
    def gather_groups(self) -> list[list[int]]:
        """Axis indices that hold the same heads of different tokens."""
        return [[g * self.ulysses + u for g in range(self.gather)] for u in range(self.ulysses)]


def degrees(design: str, ways: int, heads: int) -> Degrees:
    """The degrees that a design takes for `heads` on a sequence axis of size `ways`.

    "auto" is ulysses where `ways` divides `heads`, else ulysses_allgather.
    Raises:
      UserError: an unknown design, or ulysses with heads that `ways` does not divide.
    """
    if design not in DESIGNS:
        raise UserError(f"sequence attention {design!r} is unknown; expected one of "
                        f"{', '.join(DESIGNS)}")
    if design == "ulysses" and heads % ways:
        raise UserError(f"sequence attention is ulysses and the mesh axis sequence is {ways}, "
                        f"which does not divide {heads} heads; choose auto or ulysses_allgather, "
                        f"or a sequence axis that divides {heads}")
    ulysses = 1 if design == "allgather" else math.gcd(ways, heads)
    return Degrees(ulysses, ways // ulysses)


def make_attention(mesh: Mesh, kernel: str | Kernel = "auto", design: str = "auto") -> Attention:
    """The attention that networks on `mesh` are built with.

    Args:
      mesh: axes `data`, `fsdp` (both divide the batch) and `sequence` (divides image tokens).
      kernel: a name of `kernels.KERNELS`, or a local kernel itself.
      design: one of `DESIGNS`.
    Returns:
      `attention(q, k, v, text_q, text_k, text_v, key_mask)` as `models.attention` defines it.
    Raises:
      UserError: at once for unknown names; when traced, for shapes that the mesh cannot divide.
    """
    degrees(design, 1, 1)
    local = local_kernel(kernel, mesh.devices.flat[0]) if isinstance(kernel, str) else kernel

    def attention(q, k, v, text_q=None, text_k=None, text_v=None, key_mask=None):
        check_shapes(mesh, *q.shape[:2])
        text = None if text_q is None else (text_q, text_k, text_v)
        key_mask = _image_first(key_mask, q.shape[1], text)
        if mesh.size == 1:
            return _joint(local, (q, k, v), text, key_mask)
        body = _device_body(local, degrees(design, mesh.shape[AXIS], q.shape[2]))
        return _over_mesh(mesh, body, (q, k, v), text, key_mask)

    return attention


def make_constrain(mesh: Mesh) -> Constrain:
    """The placement of named activations (`models.placement`) on `mesh`.

    Rows that do not divide evenly are whole. Left to XLA, tokens that divide would divide the rows
    of their maps in part, and the gradient of a convolution's kernel there would come out as a
    multiple of the right one (seen in jaxlib 0.10.2: 6 rows over 4 devices, twice).

    Raises (when traced):
      UserError: a batch or token count that the mesh cannot divide.
    """
    if mesh.size == 1:
        return unconstrained

    def constrain(x: jax.Array, name: str) -> jax.Array:
        if name == TOKENS:
            check_shapes(mesh, *x.shape[:2])
        if name == ROWS and x.shape[1] % mesh.shape[AXIS]:
            name = MAP
        return lax.with_sharding_constraint(x, NamedSharding(mesh, SPECS[name]))

    return constrain


def check_network(mesh: Mesh, design: str, net: Any, height: int, width: int) -> None:
    """Refuses pictures whose tokens, or a network whose heads, the mesh cannot divide.

    Args:
      net: has `patch_size`, and `num_groups` and `pixel_num_groups` heads; a network without
        them keeps its tokens on one device.
    """
    if not hasattr(net, "num_groups"):
        if mesh.shape[AXIS] > 1:
            raise UserError(f"config.mesh.sequence is {mesh.shape[AXIS]}, but this network keeps "
                            "its tokens together; set it to 1 and use data and fsdp")
        return
    check_tokens(mesh, height // net.patch_size * (width // net.patch_size))
    for heads in (net.num_groups, net.pixel_num_groups):
        degrees(design, mesh.shape[AXIS], heads)


def check_shapes(mesh: Mesh, batch: int, tokens: int) -> None:
    """Refuses a batch or a token count that the mesh does not divide evenly."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch % ways:
        raise UserError(f"a batch of {batch} cannot be divided over data {mesh.shape['data']} x "
                        f"fsdp {mesh.shape['fsdp']}; choose a batch that {ways} divides")
    check_tokens(mesh, tokens)


def check_tokens(mesh: Mesh, tokens: int) -> None:
    """Refuses a token count that the `sequence` axis does not divide evenly."""
    if tokens % mesh.shape[AXIS]:
        raise UserError(f"{tokens} image tokens cannot be divided over the mesh axis sequence "
                        f"{mesh.shape[AXIS]}; choose a picture size or a sequence axis that fits")


def _over_mesh(mesh: Mesh, body: Callable, image: tuple, text: tuple | None,
               key_mask: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Runs `body` on every device's share. Absent text or mask are empty trees."""
    specs = ((SPECS[TOKENS],) * 3, None if text is None else (SPECS[TEXT],) * 3,
             None if key_mask is None else SPECS[TEXT])
    # Pallas kernels cannot declare what varies over the mesh, hence check_vma False.
    return jax.shard_map(body, mesh=mesh, in_specs=specs,
                         out_specs=(SPECS[TOKENS], None if text is None else SPECS[TEXT]),
                         check_vma=False)(image, text, key_mask)


def _device_body(local: Kernel, way: Degrees) -> Callable:
    """What one device does: heads in, keys gathered, attention, heads out."""

    def body(image, text, key_mask):
        q, k, v = (_trade(x, way, split=2, concat=1) for x in image)
        k, v = _gather_tokens(k, way), _gather_tokens(v, way)
        own = None if text is None else tuple(_own_heads(x, way) for x in text)
        out, text_out = _joint(local, (q, k, v), own, key_mask)
        out = _trade(out, way, split=1, concat=2)
        return out, None if text is None else _gather_heads(text_out, way)

    return body


def _joint(local: Kernel, image: tuple, text: tuple | None,
           key_mask: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Attention over [image, text]: image first keeps its slices aligned to the hardware tiles."""
    if text is None:
        return local(*image, key_mask), None
    queries = image[0].shape[1]
    out = local(*(jnp.concatenate(pair, axis=1) for pair in zip(image, text)), key_mask)
    return out[:, :queries], out[:, queries:]


def _image_first(key_mask: jax.Array | None, tokens: int,
                 text: tuple | None) -> jax.Array | None:
    """Reorders a mask over [text, image] keys to [image, text]."""
    if key_mask is None or text is None:
        return key_mask
    return jnp.roll(key_mask, tokens, axis=1)


def _trade(x: jax.Array, way: Degrees, split: int, concat: int) -> jax.Array:
    """All-to-all in a group: axis `split` is divided, axis `concat` is joined."""
    if way.ulysses == 1:
        return x
    return lax.all_to_all(x, AXIS, split, concat, axis_index_groups=_groups(way, way.heads_groups),
                          tiled=True)


def _gather_tokens(x: jax.Array, way: Degrees) -> jax.Array:
    if way.gather == 1:
        return x
    return lax.all_gather(x, AXIS, axis=1, axis_index_groups=_groups(way, way.gather_groups),
                          tiled=True)


def _own_heads(x: jax.Array, way: Degrees) -> jax.Array:
    """The heads of replicated text that this device works on."""
    count = x.shape[2] // way.ulysses
    first = lax.axis_index(AXIS) % way.ulysses * count
    return lax.dynamic_slice_in_dim(x, first, count, axis=2)


def _gather_heads(x: jax.Array, way: Degrees) -> jax.Array:
    if way.ulysses == 1:
        return x
    return lax.all_gather(x, AXIS, axis=2, axis_index_groups=_groups(way, way.heads_groups),
                          tiled=True)


def _groups(way: Degrees, groups: list[list[int]]) -> list[list[int]] | None:
    """None where one group is the whole axis, so that the plain collective is emitted."""
    return None if len(groups) == 1 else groups
