"""How long are a forward pass and a training step of a mid-size PixelDiT?

    python -m benchmarks.network [--size 256] [--batch 2] [--repeats 7] [--unroll 1] [--json FILE]

The net: hidden 384, 6 heads, 6 patch blocks, 2 pixel blocks, patch 16, pixel width 16; float32.
The step is loss, gradients, clipping, AdamW and an exponential moving average, donated buffers.
"""

import argparse

import jax
import jax.numpy as jnp

from benchmarks import timing
from pid_jax import models
from pid_jax.training.optim import AdamW

MID_SIZE = dict(hidden_size=384, num_groups=6, patch_depth=6, pixel_depth=2, patch_size=16,
                pixel_hidden_size=16, pixel_attn_hidden_size=288, pixel_num_groups=4,
                txt_embed_dim=2304, txt_max_length=300)
TEXT_TOKENS = 64


def make_batch(size: int, batch: int) -> dict[str, jax.Array]:
    """A batch of the given shape; its values do not matter for the time."""
    keys = jax.random.split(jax.random.key(0), 3)
    return {"x": jax.random.normal(keys[0], (batch, size, size, 3)),
            "t": jnp.linspace(100.0, 900.0, batch),
            "y": jax.random.normal(keys[1], (batch, TEXT_TOKENS, MID_SIZE["txt_embed_dim"])),
            "target": jax.random.normal(keys[2], (batch, size, size, 3))}


def training_step(net, optimizer):
    """(params, optimizer state, average) -> the same, one update later; jitted and donated."""

    def loss_of(params, batch):
        out = net.apply({"params": params}, batch["x"], batch["t"], batch["y"]).x
        return jnp.mean((out - batch["target"]) ** 2)

    def step(carry, batch):
        params, state, average = carry
        grads = jax.grad(loss_of)(params, batch)
        params, state, _ = optimizer.update(grads, state, params)
        average = jax.tree.map(lambda a, p: 0.999 * a + 0.001 * p, average, params)
        return params, state, average

    return jax.jit(step, donate_argnums=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--unroll", type=int, default=1, help="blocks in one turn of the loop")
    parser.add_argument("--json")
    arguments = parser.parse_args()

    net = models.build_model("pixeldit_t2i", **MID_SIZE, unroll=arguments.unroll)
    batch = make_batch(arguments.size, arguments.batch)
    params = net.init(jax.random.key(1), method="all_parameters")["params"]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    optimizer = AdamW(1e-4)
    forward = jax.jit(lambda p, b: net.apply({"params": p}, b["x"], b["t"], b["y"]).x)
    step = training_step(net, optimizer)
    carry = [jax.tree.map(jnp.copy, (params, optimizer.init(params), params))]

    def one_step():
        carry[0] = step(carry[0], batch)
        return carry[0]

    seconds = timing.interleaved(
        {"forward": lambda: forward(params, batch), "training step": one_step}, arguments.repeats)
    timing.report(f"mid-size PixelDiT, {count / 1e6:.1f}M parameters, {arguments.size} px, "
                  f"batch {arguments.batch}", seconds, arguments.json, parameters=count,
                  size=arguments.size, batch=arguments.batch, unroll=arguments.unroll)


if __name__ == "__main__":
    main()
