"""The discriminator of PiD's distillation (`Discriminator_ImageDiT` in PyTorch)."""

from pid_jax.models.discriminator import Discriminator
from tools.convert_torch_weights.mappings.engine import Rule, affine, convolution


def rules(net: Discriminator) -> list[Rule]:
    """The rules of a network with these options: convolution, norm and activation repeat."""
    strided = net.num_conv_layers - 1
    key, path = "cls_pred_heads.{head}", "head_{head}"
    found = convolution(f"{key}.{3 * strided}", f"{path}/conv_out")
    for i in range(strided):
        found += convolution(f"{key}.{3 * i}", f"{path}/conv_{i}")
        found += affine(f"{key}.{3 * i + 1}", f"{path}/norm_{i}")
    return found
