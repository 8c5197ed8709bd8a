"""Cases of TiTok and of the MaskGIT-VQGAN that it draws through."""

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.models import maskgit_vqgan, titok
from tests.golden import ditok_support as support
from tests.golden.cases import Case, handles
from tests.golden.layout import to_nchw, to_nhwc
from tools.convert_torch_weights.mappings import jax_to_torch, torch_to_jax
from tools.convert_torch_weights.mappings import titok as titok_rules
from tools.convert_torch_weights.mappings.engine import Rule, make_table


@handles("ditok", r"titok_encoder.*")
def check_encoder(case: Case) -> None:
    tensors = {name if name == "latent_tokens" else f"encoder.{name}": value
               for name, value in case.under("param/").items()}
    part = support.load_part("titok", support.titok_options(case.meta["config"]), tensors,
                             ("encoder", "latent_tokens"))
    image = to_nhwc(case.inputs["image"])
    cotangent = support.from_torch_tokens(case.inputs["cotangent"])

    def encode(params, image):
        return titok.encode(params["encoder"], params["latent_tokens"], image,
                            part.net.encoder_dims.heads, is_legacy=part.net.is_legacy,
                            collect=True)

    def loss(params, image):
        z, shown = encode(params, image)
        return jnp.sum(z * cotangent), (z, shown)

    grads, (z, shown) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(part.params, image)
    blocks = {f"tokens_block{i}": value for i, value in enumerate(shown["blocks"])}
    support.compare(case, {"z": support.to_torch_tokens(z), "tokens_ln_pre": shown["ln_pre"],
                           "latents_ln_post": shown["ln_post"], **blocks})
    ours = {key.removeprefix("encoder."): value for key, value in part.to_torch(grads[0]).items()}
    support.compare(case, ours | {"image": to_nchw(grads[1])}, "grad/")


@handles("ditok", r"titok_quantizer.*")
def check_quantizer(case: Case) -> None:
    config = case.meta["config"]
    assert not config["clustering_vq"]
    codebook = case.tensors["param/embedding.weight"]
    z = support.from_torch_tokens(case.inputs["z"])
    cotangent = support.from_torch_tokens(case.inputs["cotangent"])

    def loss(codebook, z):
        found = titok.quantize(codebook, z, config["use_l2_norm"], config["commitment_cost"])
        return jnp.sum(found.vectors * cotangent) + found.loss, found

    grads, found = jax.grad(loss, argnums=(0, 1), has_aux=True)(codebook, z)
    np.testing.assert_array_equal(found.indices[:, None], case.outputs["indices"])
    support.compare(case, {
        "z_quantized": support.to_torch_tokens(found.vectors), "indices": found.indices[:, None],
        "quantizer_loss": found.loss, "commitment_loss": found.commitment_loss,
        "codebook_loss": found.codebook_loss,
        "codebook_entries": titok.codebook_rows(codebook, case.inputs["lookup"],
                                                config["use_l2_norm"])})
    support.compare(case, {"embedding.weight": grads[0], "z": support.to_torch_tokens(grads[1])},
                    "grad/")


@handles("ditok", r"titok_decoder.*")
def check_decoder(case: Case) -> None:
    tensors = {f"decoder.{name}": value for name, value in case.under("param/").items()}
    part = support.load_part("titok", support.titok_options(case.meta["config"]), tensors,
                             ("decoder",))
    z_q = support.from_torch_tokens(case.inputs["z_quantized"])
    cotangent = case.inputs.get("cotangent")

    def loss(params, z_q):
        grid = titok.decode_tokens(params["decoder"], z_q, part.net.decoder_dims.heads)
        return jnp.sum(grid * (1 if cotangent is None else to_nhwc(cotangent))), grid

    grads, grid = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(part.params, z_q)
    support.compare(case, {"decoded": to_nchw(grid)})
    ours = {key.removeprefix("decoder."): value for key, value in part.to_torch(grads[0]).items()}
    support.compare(case, ours | {"z_quantized": support.to_torch_tokens(grads[1])}, "grad/")


@handles("ditok", r"pixel_decoder.*")
def check_pixel_decoder(case: Case) -> None:
    dims = maskgit_vqgan.PixelCodecDims(**support.pixel_options(case.meta["config"]))
    table, params = _load(titok_rules.pixel_decoder("", ""), maskgit_vqgan.decoder_init, dims,
                          case.under("param/"))
    cotangent = to_nhwc(case.inputs["cotangent"])

    def loss(params, hidden):
        image = maskgit_vqgan.decode_pixels(params, hidden, dims)
        return jnp.sum(image * cotangent), image

    grads, image = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(
        params, to_nhwc(case.inputs["hidden"]))
    support.compare(case, {"image": to_nchw(image)})
    support.compare(case, jax_to_torch(table, grads[0]) | {"hidden": to_nchw(grads[1])}, "grad/")


@handles("ditok", r"pixel_encoder_vq.*")
def check_pixel_encoder(case: Case) -> None:
    config = dict(case.meta["config"])
    cost = config.pop("commitment_cost")
    dims = maskgit_vqgan.PixelCodecDims(**support.pixel_options(config))
    tensors = case.under("param/")
    codebook = tensors.pop("quantize.embedding.weight")
    rules = titok_rules.pixel_encoder("encoder.", "")
    _, params = _load(rules, maskgit_vqgan.encoder_init, dims, tensors)
    hidden = jax.jit(lambda p, x: maskgit_vqgan.encode_pixels(p, x, dims))(
        params, to_nhwc(case.inputs["image"]))
    found = titok.quantize(codebook, hidden, False, cost)
    flat = (len(hidden), -1)
    np.testing.assert_array_equal(found.indices.reshape(flat), case.outputs["indices"])
    support.compare(case, {
        "hidden": to_nchw(hidden), "z_q": to_nchw(found.vectors), "loss": found.loss,
        "indices": found.indices.reshape(flat),
        "soft_code": maskgit_vqgan.soft_codes(codebook, hidden).reshape(*flat, len(codebook))})


def _load(rules: list[Rule], init, dims, tensors):
    abstract = jax.eval_shape(lambda key: init(key, dims), jax.random.key(0))
    table = make_table("MaskGIT-VQGAN", rules, abstract)
    return table, torch_to_jax(table, tensors)


@handles("ditok", r"titok_full.*")
def check_whole(case: Case) -> None:
    meta = case.meta
    assert meta["pixel_quantize"] == {"num_embeddings": titok.PIXEL_CODES,
                                      "embedding_dim": meta["pixel_decoder_config"]["z_channels"]}
    pixel = {f"pixel_{name}": value
             for name, value in support.pixel_options(meta["pixel_decoder_config"]).items()}
    # The reference has a pixel decoder, and zero losses, only under finetune_decoder, whatever the
    # case's config says of it.
    options = support.titok_options(meta["config"]) | pixel | {"finetune_decoder": True}
    part = support.load_part("titok", options, support.parameters(case))
    image = to_nhwc(case.inputs["image"])

    def call(method, *args):
        return jax.jit(lambda p, *a: part.apply(p, *a, method=method))(part.params, *args)

    picture, found = call("__call__", image)
    np.testing.assert_array_equal(found.indices[:, None], case.outputs["indices"])
    support.compare(case, {
        "z": support.to_torch_tokens(call("encode_vectors", image)),
        "z_quantized": support.to_torch_tokens(found.vectors), "indices": found.indices[:, None],
        "quantizer_loss": found.loss,
        "decoder_logits": to_nchw(call("decode_grid", found.vectors)),
        "reconstruction": to_nchw(picture),
        "reconstruction_from_tokens": to_nchw(call("decode_indices", found.indices))})
