"""Golden cases of the convolutional auto-encoders: moments, latents and pictures."""

import functools

import jax
import numpy as np

from pid_jax.encoders.autoencoder_codec import AutoEncoderCodec, Normalisation, network_of
from tests.golden.cases import Case, assert_close, handles
from tests.golden.layout import to_nchw, to_nhwc
from tools.convert_torch_weights.mappings import torch_to_jax
from tools.convert_torch_weights.mappings.encoders import encoder_table, naming_of, used

SIZES = {"ch": "ch", "dim": "ch", "ch_mult": "ch_mult", "dim_mult": "ch_mult",
         "num_res_blocks": "num_res_blocks", "z_channels": "z_channels", "z_dim": "z_channels"}


@handles("encoders", r"(flux|flux2|sd3|sdxl|qwen)_vae.*")
def check_autoencoder(case: Case) -> None:
    codec = load_codec(case)
    close = functools.partial(assert_close, atol=case.tolerance["atol"],
                              rtol=case.tolerance["rtol"])
    for name, expected in case.outputs.items():
        kind, size = name.split("_", 1)
        source = "z_" if kind == "recon" else "image_"
        given = to_nhwc(case.inputs[source + size])
        found = {"latent": codec.encode, "moments": codec.moments, "recon": codec.decode}[kind](given)
        close(to_nchw(found), expected, name=name)


def load_codec(case: Case) -> AutoEncoderCodec:
    """The codec that the case's JSON describes, with the case's weights."""
    config, family = case.meta["config"], case.meta["backbone"]
    sizes = {ours: config[theirs] for theirs, ours in SIZES.items() if theirs in config}
    net = network_of(family, **sizes | {"ch_mult": tuple(sizes["ch_mult"])})
    tensors = case.under("param/")
    naming = naming_of(tensors)
    assert naming == case.meta["key_format"]
    tensors = {key: tensors[key] for key in used(naming, tensors)}
    params = jax.tree.map(np.asarray, torch_to_jax(encoder_table(net, naming), tensors))
    normalisation = None
    if "latents_mean" in case.inputs:
        normalisation = Normalisation(tuple(case.inputs["latents_mean"].tolist()),
                                      tuple((1 / case.inputs["latents_std"]).tolist()))
    elif "scale_factor" in config:
        normalisation = Normalisation((config["shift_factor"],), (config["scale_factor"],))
    return AutoEncoderCodec(family, net, lambda: params, normalisation=normalisation)
