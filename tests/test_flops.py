"""The FLOP counter against hand counts and PyTorch's totals for the published networks."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pid_jax import flops, models
from pid_jax.errors import UserError
from pid_jax.flops import Flops, count_flops
from pid_jax.models import layers
from pid_jax.models.attention import project_qkv, self_attention_spec
from pid_jax.models.blocks import PixelContext, pixel_block, pixel_block_init


def shapes(*dims) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def forward_flops(name: str, size: int, call: dict | None = None, **options) -> Flops:
    """One forward pass of a picture of `size` pixels with a caption of 300 tokens."""
    net = models.build_model(name, attention=flops.counted_attention, **options)
    params = jax.eval_shape(functools.partial(models.init_parameters, net), jax.random.key(0))
    call = {"x": shapes(1, size, size, 3), "t": shapes(1), "y": shapes(1, 300, 2304)} | (call or {})
    return count_flops(lambda p, c: net.apply({"params": p}, **c).x, params, call)


def test_products_convolutions_and_loops():
    assert count_flops(lambda a, b: a @ b, shapes(3, 4), shapes(4, 5)) == Flops(2 * 3 * 4 * 5)
    twice = lambda a: lax.scan(lambda x, _: (x @ x, None), a, None, length=7)[0]
    assert count_flops(twice, shapes(4, 4)) == Flops(7 * 2 * 4**3)
    convolve = lambda x, k: lax.conv_general_dilated(
        x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    image, kernel = shapes(1, 8, 8, 3), shapes(3, 3, 3, 5)
    assert count_flops(convolve, image, kernel) == Flops(2 * 16 * 5 * 27)
    both = jax.grad(lambda x, k: (convolve(x, k) ** 2).sum(), (0, 1))
    assert count_flops(both, image, kernel).total == pytest.approx(3 * 2 * 16 * 5 * 27, rel=0.3)


def test_unused_results_do_not_count():
    assert count_flops(lambda a: (a, a @ a)[0], shapes(4, 4)) == Flops()


def test_gradient_and_remat():
    layer = lambda w, x: jnp.tanh(x @ w)
    loss = lambda f: jax.value_and_grad(lambda w, x: f(w, x).sum(), (0, 1))
    args = shapes(4, 4), shapes(8, 4)
    assert count_flops(loss(layer), *args).total == 3 * 2 * 8 * 16
    assert count_flops(loss(jax.checkpoint(layer)), *args).total == 4 * 2 * 8 * 16


def test_attention_apart():
    q, k = shapes(2, 10, 3, 8), shapes(2, 14, 3, 8)
    attend = lambda *a: flops.counted_attention(*a)[0]
    forward = 2 * 2 * 2 * 10 * 14 * 3 * 8
    assert count_flops(attend, q, k, k) == Flops(attention=forward)
    gradient = jax.grad(lambda *a: attend(*a).sum(), (0, 1, 2))
    assert count_flops(gradient, q, k, k).attention == 3 * forward - forward / 2


def test_opaque_work_is_refused():
    endless = lambda a: lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ x, a)
    with pytest.raises(UserError, match="while loop of unknown length"):
        count_flops(endless, shapes(4, 4))


def test_pixeldit_totals():
    """Derived by hand: 66 T in matrix products, 373 + 39.6 T in attention at 4096 pixels."""
    found = forward_flops("pixeldit_t2i", 4096)
    joint, pixel = 4 * 65836**2 * 1536 * 14, 4 * 65536**2 * 1152 * 2
    assert found.attention == joint + pixel
    assert found.matmul == pytest.approx(66e12, rel=5e-3)


PID_V1 = dict(lq_in_channels=0, lq_latent_channels=16)


@pytest.mark.parametrize("size, tera", [(2048, 45.1), (4096, 486.5)])
def test_pid_totals(size, tera):
    side = size // 32
    call = {"lq_latent": shapes(1, side, side, 16), "degrade_sigma": shapes(1)}
    assert round(forward_flops("pidnet", size, call, **PID_V1).total / 1e12, 1) == tera


@pytest.mark.parametrize("size, sizes, giga", [
    (256, (26, 4, 1152, 16), 311.2), (512, (26, 4, 1152, 16), 1352.2),
    (256, (12, 2, 768, 12), 75.4)])
def test_class_conditional_totals(size, sizes, giga):
    """The class-conditional PixelDiT (sizes XL and B) composed from the same layers."""
    patches, pixels, width, heads = sizes
    tokens = (size // 16) ** 2

    def init(key):
        return {"embed": layers.linear_init(key, 768, width), "time": layers.time_init(key, width),
                "attn": layers.draw(key, self_attention_spec(width, heads)),
                "mlp": layers.draw(key, layers.swiglu_spec(width)),
                "mods": layers.draw(key, layers.modulation_spec(width, width)),
                "pixel": pixel_block_init(key, width, 16, 256, width, heads)}

    def forward(params, x, z):
        condition = layers.time_embedding(params["time"], jnp.ones(1), x.dtype)[:, None]
        x = layers.linear(params["embed"], x)

        def block(x, _):
            mods = [layers.linear(part, condition) for part in layers.unstack(params["mods"])]
            out, _ = flops.counted_attention(*project_qkv(params["attn"], x, heads, None))
            x = x + mods[0] * layers.linear(params["attn"]["proj"], out.reshape(x.shape))
            return x + mods[1] * mods[2] * mods[3] * mods[4] * mods[5] * layers.swiglu(
                params["mlp"], x), None

        x, _ = lax.scan(block, x, None, length=patches)
        context = PixelContext(heads, x, None, flops.counted_attention, None)
        z = jnp.einsum("blcp,cd->bldp", z, jnp.ones((3, 16)))
        z, _ = lax.scan(lambda z, _: (pixel_block(params["pixel"], z, context), None), z, None,
                        length=pixels)
        return jnp.einsum("blcp,cd->bldp", z, jnp.ones((16, 3)))

    params = jax.eval_shape(init, jax.random.key(0))
    found = count_flops(forward, params, shapes(1, tokens, 768), shapes(1, tokens, 3, 256))
    assert found.total / 1e9 == pytest.approx(giga, rel=1e-3)


def test_peak_of_devices():
    device = lambda kind: SimpleNamespace(device_kind=kind)
    assert flops.peak_flops(device("TPU v5 lite")) == 197e12
    assert flops.peak_flops(device("NVIDIA H100 80GB HBM3")) == 989e12
    assert flops.peak_flops(device("cpu")) is None
    mesh = SimpleNamespace(devices=np.array([device("TPU v5")] * 4), size=4)
    assert flops.mesh_peak(mesh) == 4 * 459e12
