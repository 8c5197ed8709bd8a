"""PidNet: text-to-image PixelDiT with the low-quality branch (`PidNet` in PyTorch)."""

from pid_jax.models.pid import PidNet
from tools.convert_torch_weights.mappings import pixeldit_t2i
from tools.convert_torch_weights.mappings.engine import Rule, affine, convolution, layer


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
