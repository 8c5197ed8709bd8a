"""Golden cases of the representation auto-encoders."""

import dataclasses
import functools

import jax
import numpy as np

from pid_jax.encoders.representation_codec import FAMILIES, RepresentationCodec
from pid_jax.encoders.vit import MaeDecoder, Vit
from tests.golden.cases import Case, assert_close, handles
from tests.golden.layout import to_nchw, to_nhwc
from tools.convert_torch_weights.mappings import torch_to_jax
from tools.convert_torch_weights.mappings.encoders import encoder_table, used


def make_codec(case: Case) -> RepresentationCodec:
    """The codec that the case's JSON describes, with the case's weights."""
    name, config = case.meta["backbone"], case.meta["config"]
    encoder, decoder = _encoder(name, config["encoder"]), _decoder(config["decoder"])
    family = dataclasses.replace(
        FAMILIES[name], input_size=config["encoder"]["resize_target"],
        mean=tuple(config["image_mean"]), std=tuple(config["image_std"]),
        output_size=config.get("final_pixel_size", 0))
    params = {"encoder": _params(encoder, name, case.under("param/encoder/")),
              "decoder": _params(decoder, "mae_decoder", case.under("param/decoder/"))}
    if stats := case.under("param/stat/"):
        params["stats"] = {key: to_nhwc(value) for key, value in stats.items()}
    return RepresentationCodec(name, family, encoder, decoder, lambda: params)


def _params(net, naming: str, tensors: dict) -> dict:
    tensors = {key: tensors[key] for key in used(naming, tensors)}
    return torch_to_jax(encoder_table(net, naming), tensors)


def _encoder(name: str, config: dict) -> Vit:
    layers = config.get("num_layers") or config["num_hidden_layers"]
    heads = config.get("num_heads") or config["num_attention_heads"]
    width, patch = config["hidden_size"], config["patch_size"]
    return Vit(**FAMILIES[name].encoder | {
        "hidden_size": width, "num_layers": layers, "num_heads": heads, "patch_size": patch,
        "mlp_size": config.get("intermediate_size") or config["mlp_ratio"] * width,
        "grid": config.get("pos_embed_grid") or config["image_size"] // patch,
        "registers": config.get("num_register_tokens", 0), "norm_eps": config["layer_norm_eps"],
        "exact_gelu": "erf" in config["hidden_act"]})


def _decoder(config: dict) -> MaeDecoder:
    return MaeDecoder(
        in_size=config["in_hidden"], hidden_size=config["hidden"], num_layers=config["layers"],
        num_heads=config["heads"], mlp_size=config["intermediate"],
        patch_size=config["patch_size"], grid=round(config["num_patches"] ** 0.5),
        norm_eps=config["layer_norm_eps"])


@handles("encoders", r"(dinov2|siglip).*")
def check_representation(case: Case) -> None:
    codec = make_codec(case)
    for name, expected in case.outputs.items():
        kind, source = name.rsplit("_", 1)
        found = CHECKS[kind](codec, case, source)
        assert_close(found, expected, case.tolerance["atol"], case.tolerance["rtol"], name)


def _image(case: Case, source: str) -> np.ndarray:
    return to_nhwc(case.inputs[f"image_{source}"])


def _hidden(codec: RepresentationCodec, case: Case, source: str) -> np.ndarray:
    hidden = jax.jit(codec.hidden)(codec.params, _image(case, source))
    return np.asarray(hidden).reshape(len(hidden), -1, codec.channels)


def _logits(codec: RepresentationCodec, case: Case, source: str) -> np.ndarray:
    """Of a latent, or of tokens on another grid, both before the normalisation is undone."""
    if f"z_{source}" in case.inputs:
        latents = to_nhwc(case.inputs[f"z_{source}"])
        if codec.settings.statistics:
            mean, std = codec.statistics(codec.params)
            latents = latents * np.asarray(std) + np.asarray(mean)
    else:
        tokens = case.inputs[f"decoder_tokens_{source}"]
        side = round(tokens.shape[1] ** 0.5)
        latents = tokens.reshape(len(tokens), side, side, -1)
    logits = functools.partial(codec.decoder.apply, method="logits")
    return jax.jit(logits)({"params": codec.params["decoder"]}, latents)


CHECKS = {
    "resized01": lambda codec, case, source: to_nchw(codec.resized(_image(case, source))),
    "hidden": _hidden,
    "features": lambda codec, case, source: to_nchw(
        jax.jit(codec.features)(codec.params, _image(case, source))),
    "latent": lambda codec, case, source: to_nchw(codec.squeeze(_image(case, source))),
    "decoder_logits": _logits,
    "recon": lambda codec, case, source: to_nchw(
        codec.decode(to_nhwc(case.inputs[f"z_{source}"]))),
}
