"""TiTok (`TiTok` of the 1d-tokenizer code) and the MaskGIT-VQGAN in it."""

import math
from collections.abc import Mapping

from pid_jax.models.titok import TiTok
from pid_jax.models.vit import SIZES
from tools.convert_torch_weights.mappings.engine import Rule, affine, convolution, layer, pointwise
from tools.convert_torch_weights.mappings.network import (Findings, Network, Recognised, Row,
                                                          Shapes, columns)
from tools.convert_torch_weights.mappings.network import rows as rows_of
from tools.convert_torch_weights.mappings.transforms import CONV, LEADING_ONE, linear, vector


def rules(net: TiTok) -> list[Rule]:
    """The rules of a network with these options."""
    head = _head(net.is_legacy)
    return [*tokenizer("quantize"),
            *_vit("decoder"), *layer("decoder.decoder_embed", "decoder/decoder_embed"),
            Rule("decoder.mask_token", "decoder/mask_token", LEADING_ONE), *head,
            Rule("pixel_quantize.embedding.weight", "pixel_quantize/embedding"),
            *pixel_decoder("pixel_decoder.", "pixel_decoder/")]


def _head(is_legacy: bool) -> list[Rule]:
    """The decoder's head: logits over pixel codes, or pixels."""
    if is_legacy:
        return [*pointwise("decoder.ffn.0", "decoder/ffn/fc1"),
                *pointwise("decoder.ffn.2", "decoder/ffn/fc2")]
    return [*pointwise("decoder.ffn.0", "decoder/ffn/fc1"),
            *convolution("decoder.conv_out", "decoder/conv_out")]


def tokenizer(quantizer: str) -> list[Rule]:
    """Encoder, latent tokens and codebook; PyTorch calls the codebook's module `quantizer`."""
    return [Rule("latent_tokens", "latent_tokens"),
            Rule(f"{quantizer}.embedding.weight", "quantize/embedding"),
            *_vit("encoder"), *convolution("encoder.patch_embed", "encoder/patch_embed"),
            *pointwise("encoder.conv_out", "encoder/conv_out")]


def _vit(name: str) -> list[Rule]:
    key, path = f"{name}.transformer.{{i}}", f"{name}/transformer"
    tables = ("class_embedding", "positional_embedding", "latent_token_positional_embedding")
    return [*(Rule(f"{name}.{table}", f"{name}/{table}") for table in tables),
            *affine(f"{name}.ln_pre", f"{name}/ln_pre"),
            *affine(f"{name}.ln_post", f"{name}/ln_post"),
            *affine(f"{key}.ln_1", f"{path}/ln_1"), *affine(f"{key}.ln_2", f"{path}/ln_2"),
            Rule(f"{key}.attn.in_proj_weight", f"{path}/attn/qkv/kernel", linear(parts=3)),
            Rule(f"{key}.attn.in_proj_bias", f"{path}/attn/qkv/bias", vector(parts=3)),
            *layer(f"{key}.attn.out_proj", f"{path}/attn/proj"),
            *layer(f"{key}.mlp.c_fc", f"{path}/mlp/fc1"),
            *layer(f"{key}.mlp.c_proj", f"{path}/mlp/fc2")]


def pixel_decoder(key: str, path: str) -> list[Rule]:
    """The decoder of the MaskGIT-VQGAN."""
    return [*convolution(f"{key}conv_in", f"{path}conv_in"),
            *_res_block(f"{key}mid.{{j}}", f"{path}mid_{{j}}"),
            *_res_block(f"{key}up.{{i}}.block.{{j}}", f"{path}up_{{i}}/block_{{j}}"),
            *convolution(f"{key}up.{{i}}.upsample_conv", f"{path}up_{{i}}/upsample_conv"),
            *affine(f"{key}norm_out", f"{path}norm_out"),
            *convolution(f"{key}conv_out", f"{path}conv_out")]


def pixel_encoder(key: str, path: str) -> list[Rule]:
    """The encoder of the MaskGIT-VQGAN."""
    return [Rule(f"{key}conv_in.weight", f"{path}conv_in/kernel", CONV),
            *_res_block(f"{key}mid.{{j}}", f"{path}mid_{{j}}"),
            *_res_block(f"{key}down.{{i}}.block.{{j}}", f"{path}down_{{i}}/block_{{j}}"),
            *affine(f"{key}norm_out", f"{path}norm_out"),
            *convolution(f"{key}conv_out", f"{path}conv_out")]


def _res_block(key: str, path: str) -> list[Rule]:
    return [*affine(f"{key}.norm1", f"{path}/norm1"), *affine(f"{key}.norm2", f"{path}/norm2"),
            *(Rule(f"{key}.{name}.weight", f"{path}/{name}/kernel", CONV)
              for name in ("conv1", "conv2", "nin_shortcut"))]


# ---- recognition

UNDETERMINED = ("vit_enc_dims", "use_l2_norm", "is_legacy")
_PIXELS = (
    Row("pixel_z_channels", "pixel_decoder.conv_in.weight", columns, "columns"),
    Row("pixel_hidden_channels", "pixel_decoder.conv_out.weight", columns, "columns"),
)


def derive_tokenizer(found: Findings, quantizer: str) -> None:
    """Options of encoder, latent tokens and codebook."""
    book = f"{quantizer}.embedding.weight"
    found.read((
        Row("num_latent_tokens", "latent_tokens", rows_of, "rows"),
        Row("codebook_size", book, rows_of, "rows"), Row("token_size", book, columns, "columns"),
        Row("vit_enc_patch_size", "encoder.patch_embed.weight", lambda s: s[-1], "width")))
    _derive_size(found, "encoder", "vit_enc_model_size")
    table = found.shapes.get("encoder.positional_embedding", ())
    if table and "vit_enc_patch_size" in found.options:
        side = math.isqrt(table[0] - 1)
        found.add("crop_size", side * found.options["vit_enc_patch_size"],
                  f"{side} x {side} patches in encoder.positional_embedding {list(table)}")


def _derive_size(found: Findings, part: str, option: str) -> None:
    """A named size, where width and depth are those of one."""
    width = found.shapes.get(f"{part}.class_embedding", (0, 0))[-1]
    layers = found.count(f"{part}.transformer.{{i}}.")
    for name, dims in SIZES.items():
        if (dims.width, dims.layers) == (width, layers):
            found.add(option, name, f"{layers} blocks of width {width}")


def _derive(found: Findings) -> None:
    derive_tokenizer(found, "quantize")
    found.add_presence("with_decoder", "decoder.mask_token")
    found.add_presence("finetune_decoder", "pixel_decoder.conv_in.weight")
    if not found.options["with_decoder"]:
        found.add("vit_dec_dims", (), "there is no decoder")
        return
    found.add_presence("is_legacy", "decoder.ffn.2.weight")
    _derive_size(found, "decoder", "vit_dec_model_size")
    pixels = found.shapes["decoder.ffn.0.weight"][0]
    patch = found.options.get("vit_enc_patch_size") if found.options["is_legacy"] else None
    found.add("vit_dec_patch_size", patch or math.isqrt(pixels // 3), "patch of the decoder")
    if found.options["finetune_decoder"]:
        _derive_pixels(found)


def _derive_pixels(found: Findings) -> None:
    found.read(_PIXELS)
    key = "pixel_decoder.up.{i}.block.0.conv1.weight"
    levels = found.count("pixel_decoder.up.{i}.")
    widths = [found.shapes.get(key.format(i=i), (0,))[0] for i in range(levels)]
    base = found.options.get("pixel_hidden_channels") or 1
    found.add("pixel_channel_mult", tuple(width // base for width in widths), f"rows of {key}")
    found.add_count("pixel_num_res_blocks", "pixel_decoder.mid.{i}.")


def released_tokenizer(found: Recognised, shapes: Shapes) -> Mapping[str, object]:
    """What all released tokenizers of a named size share; empty for other sizes."""
    if "vit_enc_model_size" not in found.options:
        return {}
    return {"vit_enc_dims": (), "use_l2_norm": True,
            "is_legacy": found.options.get("is_legacy", True)}


def _released(found: Recognised, shapes: Shapes) -> Mapping[str, object]:
    decoder = {"vit_dec_dims": ()} if "vit_dec_model_size" in found.options else {}
    return decoder | released_tokenizer(found, shapes)


NETWORK = Network("titok", "TiTok", "encoder.latent_token_positional_embedding", rules,
                  derive=_derive, undetermined=(*UNDETERMINED, "vit_dec_dims"),
                  released=_released)
