"""The latent auto-encoders' names: LDM and diffusers; for Qwen-Image the 2-D (Wan) and 3-D ones."""

from pid_jax.encoders.autoencoder import AutoEncoder
from tools.convert_torch_weights.mappings.engine import Rule, affine, convolution, layer
from tools.convert_torch_weights.mappings.transforms import (CHANNEL_SCALE, CONV_AS_LINEAR,
                                                             FRAME_CHANNEL_SCALE, LAST_FRAME_CONV,
                                                             conv_as_linear, vector)


def ldm(net: AutoEncoder) -> list[Rule]:
    """Names of the original files (`encoder.down.0.block.0.norm1`)."""
    found = []
    for side in ("encoder", "decoder"):
        found += _ends(side, "norm_out")
        for j, block in enumerate(("block_1", "block_2"), 1):
            found += _group_block(f"{side}.mid.{block}", f"{side}/mid/block_{j}", "nin_shortcut")
        key, path = f"{side}.mid.attn_1", f"{side}/mid/attention"
        found += affine(f"{key}.norm", f"{path}/norm")
        for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("proj_out", "proj")):
            found += _pointwise(f"{key}.{theirs}", f"{path}/{ours}")
    for i in range(len(net.ch_mult)):
        key, path = f"encoder.down.{i}", f"encoder/down_{i}"
        found += _group_block(f"{key}.block.{{j}}", f"{path}/block_{{j}}", "nin_shortcut")
        found += convolution(f"{key}.downsample.conv", f"{path}/downsample")
        key, path = f"decoder.up.{len(net.ch_mult) - 1 - i}", f"decoder/up_{i}"
        found += _group_block(f"{key}.block.{{j}}", f"{path}/block_{{j}}", "nin_shortcut")
        found += convolution(f"{key}.upsample.conv", f"{path}/upsample")
    return found + _quant_convs(net, "encoder.", "decoder.") + _batch_norm()


def diffusers(net: AutoEncoder) -> list[Rule]:
    """Names of diffusers (`encoder.down_blocks.0.resnets.0.norm1`)."""
    found = []
    for side in ("encoder", "decoder"):
        found += _ends(side, "conv_norm_out")
        for j in (1, 2):
            found += _group_block(f"{side}.mid_block.resnets.{j - 1}", f"{side}/mid/block_{j}",
                                  "conv_shortcut")
        key, path = f"{side}.mid_block.attentions.0", f"{side}/mid/attention"
        found += affine(f"{key}.group_norm", f"{path}/norm")
        for theirs, ours in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj")):
            found += layer(f"{key}.{theirs}", f"{path}/{ours}")
    for side, way in (("encoder", "down"), ("decoder", "up")):
        key, path = f"{side}.{way}_blocks.{{i}}", f"{side}/{way}_{{i}}"
        found += _group_block(f"{key}.resnets.{{j}}", f"{path}/block_{{j}}", "conv_shortcut")
        found += convolution(f"{key}.{way}samplers.0.conv", f"{path}/{way}sample")
    return found + _quant_convs(net, "", "") + _batch_norm()


def wan2d(net: AutoEncoder) -> list[Rule]:
    """Names of the 2-D Qwen-Image file (`encoder.downsamples.0.residual.2`): flat lists."""
    found = [*convolution("conv1", "encoder/quant_conv"),
             *convolution("conv2", "decoder/post_quant_conv")]
    for side in ("encoder", "decoder"):
        found += convolution(f"{side}.conv1", f"{side}/conv_in")
        found += convolution(f"{side}.head.2", f"{side}/conv_out")
        found.append(Rule(f"{side}.head.0.gamma", f"{side}/norm_out/scale", CHANNEL_SCALE))
        found += _wan_block(f"{side}.middle.0", f"{side}/mid/block_1")
        found += _wan_block(f"{side}.middle.2", f"{side}/mid/block_2")
        found += _channel_attention(f"{side}.middle.1", f"{side}/mid/attention")
    for i in range(len(net.ch_mult)):
        found += _wan_level("encoder.downsamples", f"encoder/down_{i}", i, net.num_res_blocks,
                            "downsample")
        found += _wan_level("decoder.upsamples", f"decoder/up_{i}", i, net.num_res_blocks + 1,
                            "upsample")
    return found


def diffusers3d(net: AutoEncoder) -> list[Rule]:
    """Names of diffusers' 3-D class, of which a picture sees the last frame of each kernel."""
    found = [*_frame_conv("quant_conv", "encoder/quant_conv"),
             *_frame_conv("post_quant_conv", "decoder/post_quant_conv")]
    for side in ("encoder", "decoder"):
        found += _frame_conv(f"{side}.conv_in", f"{side}/conv_in")
        found += _frame_conv(f"{side}.conv_out", f"{side}/conv_out")
        found.append(Rule(f"{side}.norm_out.gamma", f"{side}/norm_out/scale", FRAME_CHANNEL_SCALE))
        for j in (1, 2):
            found += _frame_block(f"{side}.mid_block.resnets.{j - 1}", f"{side}/mid/block_{j}")
        found += _channel_attention(f"{side}.mid_block.attentions.0", f"{side}/mid/attention")
    blocks = net.num_res_blocks
    for i in range(len(net.ch_mult)):
        first, path = i * (blocks + 1), f"encoder/down_{i}"
        for j in range(blocks):
            found += _frame_block(f"encoder.down_blocks.{first + j}", f"{path}/block_{j}")
        found += convolution(f"encoder.down_blocks.{first + blocks}.resample.1",
                             f"{path}/downsample")
        key, path = f"decoder.up_blocks.{i}", f"decoder/up_{i}"
        found += _frame_block(f"{key}.resnets.{{j}}", f"{path}/block_{{j}}")
        found += convolution(f"{key}.upsamplers.0.resample.1", f"{path}/upsample")
    return found


def _ends(side: str, norm: str) -> list[Rule]:
    return [*convolution(f"{side}.conv_in", f"{side}/conv_in"),
            *convolution(f"{side}.conv_out", f"{side}/conv_out"),
            *affine(f"{side}.{norm}", f"{side}/norm_out")]


def _group_block(key: str, path: str, shortcut: str) -> list[Rule]:
    return [*affine(f"{key}.norm1", f"{path}/norm1"), *affine(f"{key}.norm2", f"{path}/norm2"),
            *convolution(f"{key}.conv1", f"{path}/conv1"),
            *convolution(f"{key}.conv2", f"{path}/conv2"),
            *convolution(f"{key}.{shortcut}", f"{path}/shortcut")]


def _pointwise(key: str, path: str) -> list[Rule]:
    """A 1x1 convolution that is a linear layer here."""
    return [Rule(f"{key}.weight", f"{path}/kernel", CONV_AS_LINEAR),
            Rule(f"{key}.bias", f"{path}/bias")]


def _quant_convs(net: AutoEncoder, before: str, after: str) -> list[Rule]:
    """In SDXL's files they stand at the top; in the original Flux2 file inside the two halves."""
    inside = net.patch > 1
    return [*convolution(f"{before if inside else ''}quant_conv", "encoder/quant_conv"),
            *convolution(f"{after if inside else ''}post_quant_conv", "decoder/post_quant_conv")]


def _batch_norm() -> list[Rule]:
    return [Rule("bn.running_mean", "bn/mean"), Rule("bn.running_var", "bn/var")]


def _wan_block(key: str, path: str) -> list[Rule]:
    return [Rule(f"{key}.residual.0.gamma", f"{path}/norm1/scale", CHANNEL_SCALE),
            *convolution(f"{key}.residual.2", f"{path}/conv1"),
            Rule(f"{key}.residual.3.gamma", f"{path}/norm2/scale", CHANNEL_SCALE),
            *convolution(f"{key}.residual.6", f"{path}/conv2"),
            *convolution(f"{key}.shortcut", f"{path}/shortcut")]


def _wan_level(key: str, path: str, level: int, blocks: int, sampler: str) -> list[Rule]:
    """Blocks and the resampling of a level stand one after another in a list of all levels."""
    first, found = level * (blocks + 1), []
    for j in range(blocks):
        found += _wan_block(f"{key}.{first + j}", f"{path}/block_{j}")
    return found + convolution(f"{key}.{first + blocks}.resample.1", f"{path}/{sampler}")


def _channel_attention(key: str, path: str) -> list[Rule]:
    return [Rule(f"{key}.norm.gamma", f"{path}/norm/scale", CHANNEL_SCALE),
            Rule(f"{key}.to_qkv.weight", f"{path}/qkv/kernel", conv_as_linear(parts=3)),
            Rule(f"{key}.to_qkv.bias", f"{path}/qkv/bias", vector(parts=3)),
            *_pointwise(f"{key}.proj", f"{path}/proj")]


def _frame_conv(key: str, path: str) -> list[Rule]:
    return [Rule(f"{key}.weight", f"{path}/kernel", LAST_FRAME_CONV),
            Rule(f"{key}.bias", f"{path}/bias")]


def _frame_block(key: str, path: str) -> list[Rule]:
    return [Rule(f"{key}.norm1.gamma", f"{path}/norm1/scale", FRAME_CHANNEL_SCALE),
            *_frame_conv(f"{key}.conv1", f"{path}/conv1"),
            Rule(f"{key}.norm2.gamma", f"{path}/norm2/scale", FRAME_CHANNEL_SCALE),
            *_frame_conv(f"{key}.conv2", f"{path}/conv2"),
            *_frame_conv(f"{key}.conv_shortcut", f"{path}/shortcut")]
