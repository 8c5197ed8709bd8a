"""Class-conditional PixelDiT (`PixDiT` in PyTorch), with its alignment projector."""

from pid_jax.models.class_conditional import ClassPixelDiT
from tools.convert_torch_weights.licences import NVIDIA
from tools.convert_torch_weights.mappings.engine import Rule, layer
from tools.convert_torch_weights.mappings.network import Findings, Network, Row
from tools.convert_torch_weights.mappings.pixeldit_t2i import (PROJECTOR_SIZES, SIZES, attention,
                                                               mlp, norm, projector)
from tools.convert_torch_weights.mappings.transforms import (channel_major,
                                                             channel_major_modulations)


def rules(net: ClassPixelDiT) -> list[Rule]:
    """The rules of a network with these options."""
    return _embedders() + _patch_blocks(net) + _pixel_blocks(net) + projector()


def _embedders() -> list[Rule]:
    return [*layer("pixel_embedder.proj", "pixel_embedder/proj"),
            *layer("s_embedder.proj", "s_embedder/proj"),
            *layer("t_embedder.mlp.0", "t_embedder/fc1"),
            *layer("t_embedder.mlp.2", "t_embedder/fc2"),
            Rule("y_embedder.embedding_table.weight", "y_embedder/embedding"),
            norm("final_layer.norm", "final_layer/norm"),
            *layer("final_layer.linear", "final_layer/linear")]


def _patch_blocks(net: ClassPixelDiT) -> list[Rule]:
    key, path = "patch_blocks.{i}", "patch_blocks"
    return [norm(f"{key}.norm1", f"{path}/norm1"), norm(f"{key}.norm2", f"{path}/norm2"),
            *attention(f"{key}.attn", f"{path}/attn", net.hidden_size, net.num_groups),
            *(rule for name in ("w1", "w2", "w3")
              for rule in layer(f"{key}.mlp.{name}", f"{path}/mlp/{name}")),
            *layer(f"{key}.adaLN_modulation.0", f"{path}/adaLN_modulation", parts=6)]


def _pixel_blocks(net: ClassPixelDiT) -> list[Rule]:
    key, path = "pixel_blocks.{i}", "pixel_blocks"
    pixels, channels = net.patch_size**2, net.pixel_hidden_size
    order, count = channel_major(pixels, channels), 4 if net.pit_adaln_post_modulation else 6
    return [norm(f"{key}.norm1", f"{path}/norm1"), norm(f"{key}.norm2", f"{path}/norm2"),
            *layer(f"{key}.compress_to_attn", f"{path}/compress_to_attn", columns=order),
            *attention(f"{key}.attn", f"{path}/attn", net.hidden_size, net.num_groups),
            *layer(f"{key}.expand_from_attn", f"{path}/expand_from_attn", rows=order),
            *mlp(f"{key}.mlp", f"{path}/mlp"),
            *layer(f"{key}.adaLN_modulation.0", f"{path}/adaLN_modulation",
                   channel_major_modulations(pixels, count, channels), parts=count)]


# ---- recognition

_MODULATIONS = "pixel_blocks.0.adaLN_modulation.0.weight"
_ROWS = (*SIZES, *PROJECTOR_SIZES,
         Row("num_classes", "y_embedder.embedding_table.weight", lambda s: s[0] - 1,
             "rows less the one for no class"))


def _derive(found: Findings) -> None:
    found.read(_ROWS)
    found.add_count("patch_depth", "patch_blocks.{i}.")
    found.add_count("pixel_depth", "pixel_blocks.{i}.")
    found.heads("num_groups", "hidden_size", "patch_blocks.0.attn.q_norm.weight")
    sizes = [found.options.get(name, 0) for name in ("pixel_hidden_size", "patch_size")]
    if all(sizes) and _MODULATIONS in found.shapes:
        rows, one = found.shapes[_MODULATIONS][0], sizes[0] * sizes[1] ** 2
        found.add("pit_adaln_post_modulation", rows == 4 * one,
                  f"{rows} rows of {_MODULATIONS} / {one} numbers of a patch")


NETWORK = Network("pixeldit_c2i", "class-conditional PixelDiT",
                  "y_embedder.embedding_table.weight", rules, _derive, objective="pixeldit_c2i",
                  licence=NVIDIA)
