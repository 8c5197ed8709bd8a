"""One process of a two-process rehearsal on CPU devices; prints one JSON line of what it saw."""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pid_jax.errors import UserError
from pid_jax.parallel import multihost, sequence

BATCH, TOKENS, HEADS, WIDTH, TEXT = 4, 16, 8, 8, 3


def loss(attention, q, text):
    image, out = attention(q, jnp.sin(q), jnp.cos(q), text, jnp.sin(text), jnp.cos(text))
    return jnp.square(image).mean() + jnp.square(out).mean()


def one_mesh(shape: tuple[int, ...]) -> dict:
    """Loss and gradient of a joint attention whose batch every process reads its share of."""
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "fsdp", "sequence"))
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    share = multihost.batch_share(sharding, BATCH)
    rows = slice(share.index * BATCH // share.count, (share.index + 1) * BATCH // share.count)
    rng = np.random.default_rng(0)
    whole = [rng.standard_normal((BATCH, n, HEADS, WIDTH)).astype(np.float32)
             for n in (TOKENS, TEXT)]
    q, text = (multihost.global_array(x[rows], sharding, share) for x in whole)
    attention = sequence.make_attention(mesh, "dense")
    step = jax.jit(jax.value_and_grad(lambda *a: loss(attention, *a), (0, 1)))
    value, gradients = multihost.to_host(step(q, text), mesh)
    return {"rows": multihost.local_rows(sharding, BATCH), "loss": float(value),
            "gradient": [float(np.abs(g).sum()) for g in gradients]}


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    multihost.start()
    found = {str(shape): one_mesh(shape) for shape in ((1, 2, 4), (1, 1, 8), (2, 2, 2))}
    multihost.refuse_difference("the same", "config")
    try:
        multihost.refuse_difference(f"process {jax.process_index()}", "config")
    except UserError as error:
        found["refused"] = str(error)
    multihost.barrier("end")
    print(json.dumps(found | {"writer": multihost.is_writer(), "devices": jax.device_count()}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
