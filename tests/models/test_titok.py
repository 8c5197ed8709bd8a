"""TiTok and its pixel decoder: shapes, the legacy fold, the quirk of the blocks, refusals."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.models import build_model, init_parameters, maskgit_vqgan, titok
from pid_jax.models.vit import vit_dims

TINY = dict(codebook_size=16, token_size=4, vit_enc_dims=(8, 1, 2), vit_dec_dims=(8, 1, 2),
            vit_enc_patch_size=4, vit_dec_patch_size=4, num_latent_tokens=6, crop_size=8)
RELEASED = {"l32": 641_054_735, "b64": 204_814_095, "s128": 83_674_639}


def parameter_count(name, **options):
    net = build_model(name, **options)
    shapes = jax.eval_shape(lambda: init_parameters(net, jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name", RELEASED)
def test_released_sizes(name):
    assert parameter_count("titok", **titok.PRESETS[name]) == RELEASED[name]


def test_tokens_and_refusals():
    net = build_model("titok", **TINY, is_legacy=False)
    params = init_parameters(net, jax.random.key(0))
    pictures = jnp.asarray(np.random.default_rng(0).random((2, 8, 8, 3)), jnp.float32)
    again, found = net.apply({"params": params}, pictures)
    assert again.shape == pictures.shape and found.indices.shape == (2, 6)
    assert found.indices.dtype == jnp.int32 and found.loss == 0  # finetune_decoder
    drawn = net.apply({"params": params}, found.indices, method="decode_indices")
    np.testing.assert_allclose(drawn, again, atol=1e-5)
    with pytest.raises(UserError, match=r"takes \[batch, 8, 8, 3\]"):
        net.apply({"params": params}, pictures[:, :4], method="encode")


@pytest.mark.parametrize("options, sentence", [
    (dict(with_decoder=False), "only makes tokens"),
    (dict(finetune_decoder=False), "no pixel decoder")])
def test_what_cannot_draw_says_so(options, sentence):
    net = build_model("titok", **TINY, **options)
    params = init_parameters(net, jax.random.key(0))
    with pytest.raises(UserError, match=sentence):
        net.apply({"params": params}, jnp.zeros((1, 6), jnp.int32), method="decode_indices")


def test_legacy_folds_without_transposing():
    params = init_parameters(build_model("titok", **TINY, with_decoder=False), jax.random.key(0))
    pictures = jnp.asarray(np.random.default_rng(1).random((1, 8, 8, 3)), jnp.float32)
    call = lambda legacy: titok.encode(params["encoder"], params["latent_tokens"], pictures, 2,
                                       is_legacy=legacy)
    (folded, shown), (straight, _) = call(True), call(False)
    latents = np.asarray(shown["ln_post"])
    kernel, bias = (np.asarray(params["encoder"]["conv_out"][name]) for name in ("kernel", "bias"))
    np.testing.assert_allclose(folded[0], latents.reshape(8, 6).T @ kernel + bias, atol=1e-5)
    np.testing.assert_allclose(straight[0], latents[0] @ kernel + bias, atol=1e-5)


def test_the_quantizer_passes_gradients_and_keeps_codes():
    book = jnp.asarray(np.random.default_rng(2).normal(size=(9, 3)), jnp.float32)
    found = titok.quantize(book, 2 * book[None, [4, 7]], use_l2_norm=True)
    assert found.indices.tolist() == [[4, 7]]
    np.testing.assert_allclose(found.vectors[0], titok.codebook_rows(book, jnp.array([4, 7]), True),
                               atol=1e-6)
    grad = jax.grad(lambda z: titok.quantize(book, z, False).vectors.sum())(jnp.ones((1, 2, 3)))
    np.testing.assert_array_equal(grad, np.ones((1, 2, 3)))


def test_a_block_that_changes_width_drops_its_input():
    dims = maskgit_vqgan.PixelCodecDims(32, (1, 2), 1, 4)
    params = maskgit_vqgan.decoder_init(jax.random.key(0), dims)
    block = params["up_0"]["block_0"]
    assert block["nin_shortcut"]["kernel"].shape == (1, 1, 32, 32)
    silent = jax.tree.map(jnp.zeros_like, block) | {"nin_shortcut": block["nin_shortcut"]}
    out = maskgit_vqgan._res_block(silent, jnp.ones((1, 2, 2, 64)))
    np.testing.assert_array_equal(out, np.zeros((1, 2, 2, 32)))


def test_sizes_are_checked():
    with pytest.raises(UserError, match="choose one of small, base, large"):
        vit_dims("giant")
    with pytest.raises(UserError, match="heads that divide the width"):
        vit_dims("base", (8, 1, 3))
    with pytest.raises(UserError, match="does not divide the picture's side 8"):
        build_model("titok", **TINY | {"vit_enc_patch_size": 3})
