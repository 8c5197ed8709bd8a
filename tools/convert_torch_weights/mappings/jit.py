"""JiT: class-conditional pixel transformer, and the diffusion decoder of DiTok made of its parts."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from pid_jax.models.jit import JiT, JitDims, patch_positions
from tools.convert_torch_weights.mappings.engine import Rule, layer, pointwise
from tools.convert_torch_weights.mappings.network import (Findings, Network, Recognised, Row,
                                                          Shapes)
from tools.convert_torch_weights.mappings.network import rows as rows_of
from tools.convert_torch_weights.mappings.transforms import (CONV, LEADING_ONE, half_split,
                                                             half_split_qkv, vector)


def rules(net: JiT) -> list[Rule]:
    """The rules of a network with these options."""
    return [*decoder(net.dims, "", ""),
            Rule("in_context_posemb", "in_context_posemb", LEADING_ONE)]


def constants(net: JiT) -> dict[str, Callable[[], np.ndarray]]:
    """The fixed embedding of the patches."""
    return {"pos_embed": lambda: positions(net.dims)}


def positions(dims: JitDims) -> np.ndarray:
    """`pos_embed` [1, L, W] as PyTorch stores it."""
    return patch_positions(dims.hidden_size, dims.grid)[None]


def decoder(dims: JitDims, key: str, path: str) -> list[Rule]:
    """Everything but the context tokens, below the prefixes `key` and `path`."""
    block, blocks = f"{key}blocks.{{i}}", f"{path}blocks"
    head = vector(half_split(dims.hidden_size // dims.num_heads))
    return [
        Rule(f"{key}x_embedder.proj1.weight", f"{path}x_embedder/proj1/kernel", CONV),
        *pointwise(f"{key}x_embedder.proj2", f"{path}x_embedder/proj2"),
        *layer(f"{key}t_embedder.mlp.0", f"{path}t_embedder/fc1"),
        *layer(f"{key}t_embedder.mlp.2", f"{path}t_embedder/fc2"),
        Rule(f"{key}y_embedder.embedding_table.weight", f"{path}y_embedder/embedding"),
        *(Rule(f"{block}.norm{n}.weight", f"{blocks}/norm{n}/scale") for n in (1, 2)),
        *layer(f"{block}.adaLN_modulation.1", f"{blocks}/adaLN_modulation", parts=6),
        *layer(f"{block}.attn.qkv", f"{blocks}/attn/qkv",
               half_split_qkv(dims.hidden_size, dims.num_heads), parts=3),
        *(Rule(f"{block}.attn.{name}.weight", f"{blocks}/attn/{name}/scale", head)
          for name in ("q_norm", "k_norm")),
        *layer(f"{block}.attn.proj", f"{blocks}/attn/proj"),
        *layer(f"{block}.mlp.w12", f"{blocks}/mlp/w12", parts=2),
        *layer(f"{block}.mlp.w3", f"{blocks}/mlp/w3"),
        Rule(f"{key}final_layer.norm_final.weight", f"{path}final_layer/norm/scale"),
        *layer(f"{key}final_layer.adaLN_modulation.1", f"{path}final_layer/adaLN_modulation",
               parts=2),
        *layer(f"{key}final_layer.linear", f"{path}final_layer/linear")]


# ---- recognition

_CONTEXT_STARTS = {(768, 12): 4, (1024, 24): 8, (1280, 32): 10}
"""Where the released networks of a width and depth take in the class tokens."""


def derive_decoder(found: Findings, key: str) -> None:
    """Options that JiT and DiTok's decoder share, of tensors below the prefix `key`."""
    found.read((
        Row("hidden_size", f"{key}x_embedder.proj2.weight", rows_of, "rows"),
        Row("bottleneck_dim", f"{key}x_embedder.proj1.weight", rows_of, "rows"),
        Row("patch_size", f"{key}x_embedder.proj1.weight", lambda s: s[-1], "width"),
        Row("num_classes", f"{key}y_embedder.embedding_table.weight", lambda s: s[0] - 1,
            "rows less the one for no class")))
    found.add_count("depth", f"{key}blocks.{{i}}.")
    found.heads("num_heads", "hidden_size", f"{key}blocks.0.attn.q_norm.weight")


def _derive(found: Findings) -> None:
    derive_decoder(found, "")
    context = found.shapes.get("in_context_posemb", (1, 0, 0))
    found.add("in_context_len", context[1], f"in_context_posemb {list(context)}")
    if not context[1]:
        found.add("in_context_start", 0, "there are no class tokens")
    patches = found.shapes.get("pos_embed", ())
    if len(patches) == 3 and "patch_size" in found.options:
        found.add("input_size", math.isqrt(patches[1]) * found.options["patch_size"],
                  f"patches of pos_embed {list(patches)}")


def _released(found: Recognised, shapes: Shapes) -> Mapping[str, object]:
    size = (found.options.get("hidden_size"), found.options.get("depth"))
    start = found.options.get("in_context_start", _CONTEXT_STARTS.get(size))
    return {} if start is None else {"in_context_start": start}


NETWORK = Network("jit", "JiT", "x_embedder.proj1.weight", rules, _derive,
                  undetermined=("in_context_start", "input_size"), released=_released,
                  objective="jit_c2i", constants=constants)
