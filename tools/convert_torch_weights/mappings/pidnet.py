"""PidNet: text-to-image PixelDiT with the low-quality branch (`PidNet` in PyTorch)."""

import math

from ml_collections import ConfigDict

from pid_jax.models.pid import PidNet
from tools.convert_torch_weights.licences import NVIDIA
from tools.convert_torch_weights.mappings import pixeldit_t2i, releases
from tools.convert_torch_weights.mappings.engine import Rule, affine, convolution, layer
from tools.convert_torch_weights.mappings.network import Findings, Network, Row, Shapes, columns


def rules(net: PidNet) -> list[Rule]:
    """The rules of a network with these options."""
    lq = "lq_proj"
    return [*pixeldit_t2i.rules(net),
            *_branch(f"{lq}.latent_proj", f"{lq}/latent_proj", net.lq_num_res_blocks),
            *_branch(f"{lq}.image_conv", f"{lq}/image_conv", net.lq_num_res_blocks),
            *convolution(f"{lq}.merge.0", f"{lq}/merge/conv"),
            *_res_blocks(f"{lq}.merge", f"{lq}/merge", net.lq_num_res_blocks, first=2),
            *layer(f"{lq}.output_heads.{{i}}", f"{lq}/output_heads"),
            *layer(f"{lq}.pit_head", f"{lq}/pit_head"),
            *affine(f"{lq}.lq_aux_rgb_head.0", f"{lq}/lq_aux_rgb_head/norm"),
            *layer(f"{lq}.lq_aux_rgb_head.1", f"{lq}/lq_aux_rgb_head/hidden"),
            *layer(f"{lq}.lq_aux_rgb_head.3", f"{lq}/lq_aux_rgb_head/out"),
            *_gate(f"{lq}.gate_modules.{{i}}", f"{lq}/gate_modules"),
            *_gate("pit_lq_gate", "pit_lq_gate")]


def _gate(key: str, path: str) -> list[Rule]:
    return [Rule(f"{key}.log_alpha", f"{path}/log_alpha"),
            *layer(f"{key}.content_proj", f"{path}/content_proj")]


def _branch(key: str, path: str, blocks: int) -> list[Rule]:
    return [*convolution(f"{key}.0", f"{path}/conv_in"),
            *convolution(f"{key}.2", f"{path}/conv_out"),
            *_res_blocks(key, path, blocks, first=3)]


def _res_blocks(key: str, path: str, blocks: int, first: int) -> list[Rule]:
    """ResBlocks at positions `first`, `first` + 1, ... of a sequence."""
    found = []
    for i in range(blocks):
        block, name = f"{path}/res_block_{i}", f"{key}.{first + i}.block"
        found += [*affine(f"{name}.0", f"{block}/norm1"),
                  *convolution(f"{name}.2", f"{block}/conv1"),
                  *affine(f"{name}.3", f"{block}/norm2"),
                  *convolution(f"{name}.5", f"{block}/conv2")]
    return found


# ---- recognition

_ROWS = (
    Row("lq_hidden_dim", "lq_proj.output_heads.0.weight", columns, "columns"),
    Row("lq_gate_type", "lq_proj.gate_modules.0.content_proj.weight",
        lambda s: "sigma_aware_per_token" if s[0] == 1 else "sigma_aware_per_token_per_dim",
        "one gate value a token, or one a channel"),
)


def _derive(found: Findings) -> None:
    pixeldit_t2i.derive(found)
    found.read(_ROWS)
    depth, heads = found.options["patch_depth"], found.count("lq_proj.output_heads.{i}.")
    intervals = [n for n in range(1, depth + 1) if math.ceil(depth / n) == heads]
    if len(intervals) == 1:
        found.add("lq_interval", intervals[0], f"{depth} blocks, {heads} lq_proj.output_heads")
    _derive_branches(found)
    found.add_presence("pit_lq_inject", "pit_lq_gate.log_alpha")


def _derive_branches(found: Findings) -> None:
    """Stem and ResBlocks; channels count after unpatchifying or folding."""
    shapes, patch = found.shapes, found.options.get("patch_size", 0)
    aux = shapes.get("lq_proj.lq_aux_rgb_head.3.weight", ())
    found.add_presence("lq_aux_rgb_head", "lq_proj.lq_aux_rgb_head.3.weight")
    branch = "latent_proj" if releases.STEM in shapes else "image_conv"
    found.add("lq_num_res_blocks", max(0, found.count(f"lq_proj.{branch}.{{i}}.") - 2),
              f"entries of lq_proj.{branch} less the two convolutions")
    image = shapes.get("lq_proj.image_conv.0.weight", ())
    found.add("lq_in_channels", 3 if image else 0,
              f"lq_proj.image_conv is {'there' if image else 'not there'}")
    if releases.STEM not in shapes:
        found.add("lq_latent_channels", 0, "there is no lq_proj.latent_proj")
    for tensor, key, axis in ((aux, "lq_aux_rgb_head.3", 0), (image, "image_conv.0", 1)):
        cell = math.isqrt(tensor[axis] // 3) if len(tensor) > 1 else 0
        if cell and patch % cell == 0:
            found.add("sr_scale", patch // cell,
                      f"patch_size {patch} / cell {cell} of lq_proj.{key} {list(tensor)}")


def _complete(options: ConfigDict, shapes: Shapes) -> None:
    """Channels of the latent before unpatchifying and folding, from those of the first layer."""
    if ("lq_latent_channels" not in options and "patch_size" in options
            and releases.STEM in shapes):
        cell = options.latent_spatial_down_factor // options.lq_latent_unpatchify_factor
        fold = max(1, options.patch_size // (options.sr_scale * cell))
        unpatchify = options.lq_latent_unpatchify_factor
        options.lq_latent_channels = shapes[releases.STEM][1] * unpatchify**2 // fold**2


NETWORK = Network(
    "pidnet", releases.title, "lq_proj.output_heads.0.weight", rules, _derive,
    undetermined=("rope_mode", "rope_ref_h", "rope_ref_w", "lq_conv_padding_mode", "sr_scale",
                  "latent_spatial_down_factor", "lq_latent_unpatchify_factor", "lq_interval"),
    released=releases.undetermined_options, families=releases.families_of,
    version=releases.version_of, complete=_complete, objective="pid_teacher",
    licence=NVIDIA)
