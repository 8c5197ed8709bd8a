import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.encoders import LatentCodec, build_codec
from pid_jax.encoders.autoencoder import AutoEncoder, chunked_attention
from pid_jax.errors import UserError
from pid_jax.models import init_parameters

FAMILIES = {"flux": (16, 8), "sd3": (16, 8), "sdxl": (4, 8), "flux2": (128, 16),
            "qwenimage": (16, 8)}


@pytest.fixture(scope="module")
def images():
    return jax.random.uniform(jax.random.key(3), (2, 32, 48, 3), minval=-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_without_computing(family, images):
    codec = build_codec(family, weights="random")
    channels, factor = FAMILIES[family]
    assert isinstance(codec, LatentCodec)
    assert (codec.family, codec.channels, codec.spatial_factor) == (family, channels, factor)
    latents = jax.eval_shape(codec.encode, images)
    assert latents.shape == (2, 32 // factor, 48 // factor, channels)
    assert jax.eval_shape(codec.decode, latents).shape == images.shape
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(codec.params))


@pytest.mark.parametrize("norm, blocks, band", [("group", 1, 16), ("channel", 2, 8)])
def test_bands_give_the_whole_result(norm, blocks, band):
    """To 2e-5 of the largest moment: only the order of sums differs. Odd height, three bands."""
    net = AutoEncoder(ch=32, ch_mult=(1, 1), num_res_blocks=blocks, z_channels=2, norm=norm)
    params = jax.jit(lambda: init_parameters(net, jax.random.key(0)))()
    images = jax.random.normal(jax.random.key(1), (2, 37, 12, 3))

    def encode(band):
        return jax.jit(lambda p, x: net.apply({"params": p}, x, band, method="encode"))(
            params, images)

    whole = encode(0)
    np.testing.assert_allclose(encode(band), whole, atol=2e-5 * float(jnp.abs(whole).max()))


def test_large_pictures_go_in_bands():
    codec = build_codec("flux", weights="random")
    assert (codec.band_for(2048, 2048), codec.band_for(2048, 2056)) == (0, 256)
    assert build_codec("flux", weights="random", band=64).band_for(512, 512) == 64


def test_attention_in_chunks():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 11, 4))
    np.testing.assert_allclose(chunked_attention(q, k, v, chunk=4), chunked_attention(q, k, v),
                               atol=1e-6)


def test_bfloat16_is_near_float32():
    images = jax.random.uniform(jax.random.key(3), (1, 16, 16, 3), minval=-1)
    exact = build_codec("flux", weights="random").encode(images)
    rough = build_codec("flux", weights="random", dtype="bfloat16").encode(images)
    assert rough.dtype == jnp.float32
    np.testing.assert_allclose(rough, exact, atol=0.05 * float(jnp.std(exact)) + 0.01)


@pytest.mark.parametrize("family, shape, words", [
    ("flux", (1, 16, 16, 4), "got shape"), ("flux", (1, 4, 16, 3), "at least 8"),
    ("flux2", (1, 16, 24, 3), "divisible by 16")])
def test_wrong_images(family, shape, words):
    with pytest.raises(UserError, match=words):
        build_codec(family, weights="random").encode(jnp.zeros(shape))


def test_wrong_latents_and_options():
    with pytest.raises(UserError, match="h, w, 128"):
        build_codec("flux2", weights="random").decode(jnp.zeros((1, 2, 2, 16)))
    with pytest.raises(UserError, match="band is 3"):
        build_codec("flux", weights="random", band=3)
    with pytest.raises(UserError, match="float16"):
        build_codec("flux", weights="random", dtype="float16")


def test_missing_weights_are_told_when_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("PID_JAX_WEIGHTS", str(tmp_path))
    codec = build_codec("sd3")
    with pytest.raises(UserError) as raised:
        codec.encode(jnp.zeros((1, 16, 16, 3)))
    for words in (f"{tmp_path}/sd3/encoder.json is missing", "stable-diffusion-3-medium",
                  "--name sd3", "config.codec.weights"):
        assert words in str(raised.value)
