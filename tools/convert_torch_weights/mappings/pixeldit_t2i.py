"""Text-to-image PixelDiT (`PixDiT_T2I` in PyTorch)."""

import math

from pid_jax.models import repa
from pid_jax.models import token_compression as compression
from pid_jax.models.pixeldit import PixelDiT
from tools.convert_torch_weights.licences import NVIDIA
from tools.convert_torch_weights.mappings.engine import Rule, layer
from tools.convert_torch_weights.mappings.network import (Findings, Network, Recognised, Row,
                                                          Shapes, columns, rows as rows_of)
from tools.convert_torch_weights.mappings.releases import has_released_sizes
from tools.convert_torch_weights.mappings.transforms import (channel_major,
                                                             channel_major_modulations,
                                                             half_split, half_split_qkv, vector)


def rules(net: PixelDiT) -> list[Rule]:
    """The rules of a network with these options."""
    return (_embedders() + _patch_blocks(net) + _pixel_blocks(net) + _encoder_decoder(net)
            + projector())


def norm(key: str, path: str) -> Rule:
    """An RMSNorm."""
    return Rule(f"{key}.weight", f"{path}/scale")


def attention(key: str, path: str, width: int, heads: int, side: str = "") -> list[Rule]:
    """qkv, q/k norms and projection; `side` is the names' ending ("_x", "_y" or nothing)."""
    head = vector(half_split(width // heads))
    return [*layer(f"{key}.qkv{side}", f"{path}/qkv{side}", half_split_qkv(width, heads), parts=3),
            Rule(f"{key}.q_norm{side}.weight", f"{path}/q_norm{side}/scale", head),
            Rule(f"{key}.k_norm{side}.weight", f"{path}/k_norm{side}/scale", head),
            *layer(f"{key}.proj{side}", f"{path}/proj{side}")]


def mlp(key: str, path: str) -> list[Rule]:
    """The two layers of a feed-forward."""
    return layer(f"{key}.fc1", f"{path}/fc1") + layer(f"{key}.fc2", f"{path}/fc2")


def projector() -> list[Rule]:
    """The projector of REPA; its layers are numbered with the activations between them."""
    return [rule for number, name in enumerate(("fc1", "fc2", "fc3"))
            for rule in layer(f"{repa.NAME}.{2 * number}", f"{repa.NAME}/{name}")]


def _embedders() -> list[Rule]:
    return [Rule("y_pos_embedding", "y_pos_embedding"),
            *layer("pixel_embedder.proj", "pixel_embedder/proj"),
            *layer("s_embedder.proj", "s_embedder/proj"),
            *layer("t_embedder.mlp.0", "t_embedder/fc1"),
            *layer("t_embedder.mlp.2", "t_embedder/fc2"),
            *layer("y_embedder.proj", "y_embedder/proj"),
            norm("y_embedder.norm", "y_embedder/norm"),
            norm("final_layer.norm", "final_layer/norm"),
            *layer("final_layer.linear", "final_layer/linear")]


def _patch_blocks(net: PixelDiT) -> list[Rule]:
    key, path, found = "patch_blocks.{i}", "patch_blocks", []
    for side, long_name in (("x", "img"), ("y", "txt")):
        found += [norm(f"{key}.norm_{side}{n}", f"{path}/norm_{side}{n}") for n in (1, 2)]
        found += attention(f"{key}.attn", f"{path}/attn", net.hidden_size, net.num_groups,
                           f"_{side}")
        for name in ("w1", "w2", "w3"):
            found += layer(f"{key}.mlp_{side}.{name}", f"{path}/mlp_{side}/{name}")
        name = f"adaLN_modulation_{long_name}"
        found += layer(f"{key}.{name}.0", f"{path}/{name}", parts=6)
    return found


def _pixel_blocks(net: PixelDiT) -> list[Rule]:
    key, path = "pixel_blocks.{i}", "pixel_blocks"
    pixels, channels = net.patch_size**2, net.pixel_hidden_size
    order = channel_major(pixels, channels)
    return [norm(f"{key}.norm1", f"{path}/norm1"), norm(f"{key}.norm2", f"{path}/norm2"),
            *layer(f"{key}.compress_to_attn", f"{path}/compress_to_attn", columns=order),
            *attention(f"{key}.attn", f"{path}/attn", net.pixel_attn_hidden_size,
                       net.pixel_num_groups),
            *layer(f"{key}.expand_from_attn", f"{path}/expand_from_attn", rows=order),
            *mlp(f"{key}.mlp", f"{path}/mlp"),
            *layer(f"{key}.adaLN_modulation.0", f"{path}/adaLN_modulation",
                   channel_major_modulations(pixels, 6, channels), parts=6)]


def _encoder_decoder(net: PixelDiT) -> list[Rule]:
    found = [norm("s_ed_in_norm", "s_ed_in_norm"), norm("s_ed_out_norm", "s_ed_out_norm")]
    for name in ("s_ed_proj_in", "s_ed_proj_out", "s_ed_cond_proj"):
        found += layer(name, name)
    for side in ("encoder_ed", "decoder_ed"):
        key, path = f"{side}.stages.{{i}}", f"{side}/stages_{{i}}"
        found += _stage_block(f"{key}.blocks.{{j}}", f"{path}/blocks_{{j}}", net)
        found += _merge(f"{key}.compress", f"{path}/merge", "proj_to_hidden.0")
        found += _expand(f"{key}.expand", f"{path}/expand", "proj_from_hidden")
    return found


def _stage_block(key: str, path: str, net: PixelDiT) -> list[Rule]:
    return [norm(f"{key}.norm1", f"{path}/norm1"), norm(f"{key}.norm2", f"{path}/norm2"),
            *attention(f"{key}.attn", f"{path}/attn", compression.width(net),
                       compression.heads(net)),
            *mlp(f"{key}.mlp", f"{path}/mlp"),
            *layer(f"{key}.adaLN_modulation.0", f"{path}/adaLN_modulation", parts=6),
            *_merge(f"{key}._ts_compress", f"{path}/shuffle_merge", "proj_to_attn"),
            *_expand(f"{key}._ts_expand", f"{path}/shuffle_expand", "proj_from_attn")]


def _merge(key: str, path: str, out: str) -> list[Rule]:
    return [*layer(f"{key}.adapter_in.0", f"{path}/adapter_in"),
            *layer(f"{key}.proj_down", f"{path}/proj_down"),
            *layer(f"{key}.{out}", f"{path}/proj_out")]


def _expand(key: str, path: str, into: str) -> list[Rule]:
    return [*layer(f"{key}.{into}", f"{path}/proj_in"),
            *layer(f"{key}.proj_up.0", f"{path}/proj_up"),
            *layer(f"{key}.adapter_out.0", f"{path}/adapter_out")]


# ---- recognition

SIZES = (
    Row("hidden_size", "s_embedder.proj.weight", rows_of, "rows"),
    Row("patch_size", "s_embedder.proj.weight", lambda s: math.isqrt(s[1] // 3),
        "columns are 3 colours times the patch's pixels"),
    Row("pixel_hidden_size", "pixel_embedder.proj.weight", rows_of, "rows"),
)
PROJECTOR_SIZES = (
    Row("repa_features", f"{repa.NAME}.4.weight", rows_of, "rows"),
    Row("repa_width", f"{repa.NAME}.4.weight", columns, "columns"),
)
_ROWS = (
    *SIZES,
    Row("txt_embed_dim", "y_embedder.proj.weight", columns, "columns"),
    Row("txt_max_length", "y_pos_embedding", columns, "its tokens"),
    Row("pixel_attn_hidden_size", "pixel_blocks.0.compress_to_attn.weight", rows_of, "rows"),
)


def derive(found: Findings) -> None:
    """The options that shapes determine."""
    found.read(_ROWS)
    found.read(PROJECTOR_SIZES)
    found.add_count("patch_depth", "patch_blocks.{i}.")
    found.add_count("pixel_depth", "pixel_blocks.{i}.")
    found.heads("num_groups", "hidden_size", "patch_blocks.0.attn.q_norm_x.weight")
    found.heads("pixel_num_groups", "pixel_attn_hidden_size", "pixel_blocks.0.attn.q_norm.weight")
    if stages := found.count("encoder_ed.stages.{i}."):
        _derive_encoder_decoder(found, stages)


def _derive_encoder_decoder(found: Findings, stages: int) -> None:
    stage = "encoder_ed.stages.0"
    found.add("enable_ed", True, f"{stages} stages encoder_ed.stages")
    found.add("ed_compress_ratio", 2**stages, f"2 to the number of stages, {stages}")
    found.add_count("ed_depth_per_stage", f"{stage}.blocks.{{i}}.")
    found.read((
        Row("ed_hidden_size", f"{stage}.blocks.0.attn.proj.weight", rows_of, "rows"),
        Row("ed_window_size", f"{stage}.compress.proj_down.weight",
            lambda s: math.isqrt(s[1] // max(s[0], 1)), "square root of columns by rows"),
    ))
    found.heads("ed_num_heads", "ed_hidden_size", f"{stage}.blocks.0.attn.q_norm.weight")
    found.add_presence("ed_use_token_shuffle", f"{stage}.blocks.0._ts_compress.proj_down.weight")


def _released(found: Recognised, shapes: Shapes) -> dict[str, object]:
    rotary = {"rope_mode": "original", "rope_ref_h": 1024, "rope_ref_w": 1024}
    return rotary if has_released_sizes(found) else {}


NETWORK = Network("pixeldit_t2i", "text-to-image PixelDiT", "patch_blocks.0.attn.qkv_x.weight",
                  rules, derive, undetermined=("rope_mode", "rope_ref_h", "rope_ref_w"),
                  released=_released, objective="pixeldit_t2i", licence=NVIDIA)
