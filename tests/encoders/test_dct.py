import jax
import jax.numpy as jnp
import numpy as np
import pytest
import skimage.data

from pid_jax.encoders import LatentCodec, build_codec
from pid_jax.encoders.dct import basis
from pid_jax.errors import UserError


@pytest.fixture(scope="module")
def photo():
    pixels = skimage.data.chelsea()[:296, :448]
    return jnp.asarray(pixels[None], jnp.float32) / 127.5 - 1


BLOCKS = pytest.mark.parametrize("block", [2, 4, 8])


@BLOCKS
def test_basis_is_orthonormal(block):
    rows = basis(block).reshape(len(basis(block)), -1)
    np.testing.assert_allclose(rows @ rows.T, np.eye(len(rows)), atol=1e-12)


@BLOCKS
def test_decoded_latents_encode_to_themselves(block):
    codec = build_codec("dct", block=block)
    latents = jax.random.normal(jax.random.key(0), (2, 3, 5, codec.channels))
    again = codec.encode(codec.decode(latents))
    np.testing.assert_allclose(again, latents, atol=1e-5)


def test_only_the_dropped_frequencies_are_lost(photo):
    codec = build_codec("dct")
    lost = photo - codec.decode(codec.encode(photo))
    np.testing.assert_allclose(codec.encode(lost), 0, atol=1e-4)
    assert float(jnp.mean(lost**2)) < 0.01


COLOURS = np.array([0.3, -0.7, 0.9])


@BLOCKS
def test_flat_colours_lie_in_the_span_of_the_basis(block):
    rows = basis(block).reshape(len(basis(block)), -1)
    flat = np.tile(COLOURS, block * block)
    np.testing.assert_allclose(rows.T @ (rows @ flat), flat, atol=1e-12)


def test_flat_colours_survive_but_for_rounding():
    codec = build_codec("dct")
    colours = jnp.asarray(COLOURS, jnp.float32) * jnp.ones((1, 64, 72, 1))
    # A latent is a sum of 192 float32 products, whose order is the processor's.
    rounding = np.sqrt(8 * 8 * 3) * np.finfo(np.float32).eps
    np.testing.assert_allclose(codec.decode(codec.encode(colours)), colours, atol=rounding)


@BLOCKS
def test_latents_of_photographs_are_about_unit(photo, block):
    codec = build_codec("dct", block=block)
    rms = jnp.sqrt(jnp.mean(codec.encode(photo)**2, axis=(0, 1, 2)))
    assert float(rms.min()) > 0.2 and float(rms.max()) < 2


def test_protocol_and_jit(photo):
    codec = build_codec("dct")
    assert isinstance(codec, LatentCodec)
    assert (codec.family, codec.channels, codec.spatial_factor) == ("dct", 16, 8)
    np.testing.assert_allclose(jax.jit(codec.encode)(photo), codec.encode(photo), atol=1e-5)


def test_smaller_blocks_are_other_families_and_lose_less(photo):
    codecs = [build_codec("dct", block=block) for block in (8, 4, 2)]
    assert [(c.family, c.spatial_factor, c.channels) for c in codecs] == [
        ("dct", 8, 16), ("dct4", 4, 16), ("dct2", 2, 6)]
    losses = [float(jnp.mean((c.decode(c.encode(photo)) - photo)**2)) for c in codecs]
    assert losses[2] < losses[1] / 2 < losses[0] / 4
    with pytest.raises(UserError, match="block=5"):
        build_codec("dct", block=5)


@pytest.mark.parametrize("shape", [(1, 12, 16, 3), (1, 16, 9, 3), (1, 16, 16, 4), (16, 16, 3)])
def test_wrong_images_are_refused(shape):
    with pytest.raises(UserError):
        build_codec("dct").encode(jnp.zeros(shape))


def test_wrong_channel_count_is_refused():
    with pytest.raises(UserError, match="16"):
        build_codec("dct").decode(jnp.zeros((1, 2, 2, 4)))


@pytest.mark.parametrize("name, options, hint", [
    ("dtc", {}, "did you mean 'dct'"), ("dct", {"channels": 4}, "known: block")])
def test_unknown_names_and_options(name, options, hint):
    with pytest.raises(UserError, match=hint):
        build_codec(name, **options)
