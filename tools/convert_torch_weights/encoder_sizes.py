"""Options of the encoders' networks, told by the shapes of their tensors."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pid_jax.encoders.gemma2 import Gemma2
from pid_jax.errors import UserError

Shapes = Mapping[str, tuple[int, ...]]


def autoencoder_sizes(naming: str, shapes: Shapes) -> dict[str, Any]:
    """ch, ch_mult, num_res_blocks and z_channels of an `AutoEncoder`; {} where none can be told."""
    measure = _flat_levels if naming in ("wan2d", "diffusers3d") else _named_levels
    conv_in, z_in = (("encoder.conv1.weight", "decoder.conv1.weight") if naming == "wan2d" else
                     ("encoder.conv_in.weight", "decoder.conv_in.weight"))
    if any(len(shapes.get(key, ())) < 2 or 0 in shapes[key] for key in (conv_in, z_in)):
        return {}
    ch = shapes[conv_in][0]
    widths, blocks = measure(naming, shapes)
    return {"ch": ch, "ch_mult": tuple(width // ch for width in widths),
            "num_res_blocks": blocks, "z_channels": shapes[z_in][1]}


_LEVEL = {"ldm": r"encoder\.down\.(\d+)\.block\.(\d+)\.conv2\.weight",
          "diffusers": r"encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.conv2\.weight"}


def _named_levels(naming: str, shapes: Shapes) -> tuple[list[int], int]:
    """Widths of the encoder's levels and blocks of one, where names tell level and block."""
    widths: dict[int, int] = {}
    blocks = 0
    for key, shape in shapes.items():
        if match := re.fullmatch(_LEVEL[naming], key):
            widths[int(match[1])] = shape[0]
            blocks = max(blocks, int(match[2]) + 1)
    return [widths[level] for level in sorted(widths)], blocks


_ENTRY = {"wan2d": r"encoder\.downsamples\.(\d+)\.residual\.6\.weight",
          "diffusers3d": r"encoder\.down_blocks\.(\d+)\.conv2\.weight"}


def _flat_levels(naming: str, shapes: Shapes) -> tuple[list[int], int]:
    """As `_named_levels` for one list of blocks and resamplings: a gap ends a level."""
    found = {int(match[1]): shape[0] for key, shape in shapes.items()
             if (match := re.fullmatch(_ENTRY[naming], key))}
    places = sorted(found)
    last = [place for place in places if place + 1 not in found]
    return [found[place] for place in last], last[0] + 1 if last else 0


# Options of Gemma-2 that no shape tells; a config.json beside the weights has them.
_GEMMA_OPTIONS = ("head_dim", "query_pre_attn_scalar", "sliding_window", "rope_theta",
                  "rms_norm_eps")


def gemma_options(shapes: Shapes, folder: Path) -> dict[str, Any]:
    """Options of a `Gemma2`: from the shapes and, where there is one, the published config."""
    config = read_config(folder / "config.json")
    head_dim = config.get("head_dim", Gemma2.head_dim)
    layer = "layers.0.self_attn"
    options = {"vocab_size": shapes["embed_tokens.weight"][0],
               "hidden_size": shapes["embed_tokens.weight"][1],
               "intermediate_size": shapes["layers.0.mlp.up_proj.weight"][0],
               "num_hidden_layers": sum(key.endswith(".mlp.up_proj.weight") for key in shapes),
               "num_attention_heads": shapes[f"{layer}.q_proj.weight"][0] // head_dim,
               "num_key_value_heads": shapes[f"{layer}.k_proj.weight"][0] // head_dim}
    options |= {name: config[name] for name in _GEMMA_OPTIONS if name in config}
    if "layer_types" in config:
        options["full_attention"] = full_layers(config["layer_types"])
    return options


def full_layers(layer_types: list[str]) -> tuple[int, ...]:
    """Numbers of the layers with full attention."""
    return tuple(i for i, kind in enumerate(layer_types) if kind == "full_attention")


def read_config(path: Path) -> dict[str, Any]:
    """A published JSON config; {} where there is none. UserError for a damaged one."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} cannot be read: it is no table of options")
    return config


_VIT_KEYS = {
    "dinov2": ("embeddings.patch_embeddings.projection.weight", "embeddings.position_embeddings",
               "encoder.layer.0.mlp.fc1.weight", ".norm1.weight"),
    "siglip": ("vision_model.embeddings.patch_embedding.weight",
               "vision_model.embeddings.position_embedding.weight",
               "vision_model.encoder.layers.0.mlp.fc1.weight", ".layer_norm1.weight")}


def vit_sizes(codec: str, shapes: Shapes) -> dict[str, Any]:
    """Sizes of a `Vit`; its heads are told by no shape."""
    patch, position, inner, norm = _VIT_KEYS[codec]
    registers = shapes.get("embeddings.register_tokens", (1, 0))[1]
    places = shapes[position][-2] - (codec == "dinov2")
    return {"hidden_size": shapes[patch][0], "patch_size": shapes[patch][-1],
            "grid": math.isqrt(places), "mlp_size": shapes[inner][0], "registers": registers,
            "num_layers": sum(key.startswith(inner.split(".0.")[0]) and key.endswith(norm)
                              for key in shapes)}


def decoder_sizes(shapes: Shapes) -> dict[str, Any]:
    """Sizes of a `MaeDecoder`; its heads are told by no shape."""
    hidden, in_size = shapes["decoder_embed.weight"]
    return {"in_size": in_size, "hidden_size": hidden,
            "num_layers": sum(key.endswith(".layernorm_before.weight") for key in shapes),
            "mlp_size": shapes["decoder_layers.0.intermediate.dense.weight"][0],
            "patch_size": math.isqrt(shapes["decoder_pred.weight"][0] // 3),
            "grid": math.isqrt(shapes["decoder_pos_embed"][1] - 1)}
