"""Compiles one joint block, forward and backward, for four TPU v5e; prints what it found as JSON."""

import json

from pid_jax.ahead_of_time import topology

topology.prepare()

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pid_jax.models import blocks, placement
from pid_jax.models.rope import image_rope, text_rope
from pid_jax.parallel import hlo, mesh, sequence
from pid_jax.parallel.sharding import state_shardings
from pid_jax.training.checkpoint import with_shardings

GRID, TEXT, HIDDEN, HEADS = (32, 32), 300, 256, 4


def described(devices: Mesh, tokens: int, name: str) -> jax.ShapeDtypeStruct:
    """Two samples of bfloat16 tokens, placed as activations of this name."""
    return jax.ShapeDtypeStruct((2, tokens, HIDDEN), jnp.bfloat16,
                                sharding=NamedSharding(devices, sequence.SPECS[name]))


def main() -> None:
    """Mesh 1x2x2: batch over fsdp, image tokens over sequence, splash attention in between."""
    machine = topology.open_topology("v5e:2x2")
    devices = Mesh(np.array(machine.devices).reshape(1, 2, 2), mesh.AXES)
    attention = sequence.make_attention(devices)
    tables = image_rope(HIDDEN // HEADS, GRID, "original", GRID), text_rope(64, TEXT, 1e4)

    def loss(params, image, text, condition):
        context = blocks.PatchContext(HEADS, condition, *tables, attention, None)
        return sum(jnp.square(out).astype(jnp.float32).sum()
                   for out in blocks.patch_block(params, (image, text), context))

    params = jax.eval_shape(lambda: blocks.patch_block_init(jax.random.key(0), HIDDEN, HEADS))
    arguments = (with_shardings(params, state_shardings(params, devices)),
                 described(devices, GRID[0] * GRID[1], placement.TOKENS),
                 described(devices, TEXT, placement.TEXT), described(devices, 1, placement.TEXT))
    compiled = jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile()
    found = hlo.summarise(compiled.as_text())
    print(json.dumps({"device": machine.devices[0].device_kind, "kernels": found.kernels,
                      "collectives": found.collectives, "cycles": found.cycles,
                      "unknown_loops": found.unknown_loops}))


if __name__ == "__main__":
    main()
