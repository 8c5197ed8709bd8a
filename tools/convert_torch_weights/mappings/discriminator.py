"""The discriminator of PiD's distillation (`Discriminator_ImageDiT` in PyTorch)."""

from pid_jax.models.discriminator import Discriminator
from tools.convert_torch_weights.licences import NVIDIA
from tools.convert_torch_weights.mappings.engine import Rule, affine, convolution
from tools.convert_torch_weights.mappings.network import Findings, Network, Row, columns


def rules(net: Discriminator) -> list[Rule]:
    """The rules of a network with these options: convolution, norm and activation repeat."""
    strided = net.num_conv_layers - 1
    key, path = "cls_pred_heads.{head}", "head_{head}"
    found = convolution(f"{key}.{3 * strided}", f"{path}/conv_out")
    for i in range(strided):
        found += convolution(f"{key}.{3 * i}", f"{path}/conv_{i}")
        found += affine(f"{key}.{3 * i + 1}", f"{path}/norm_{i}")
    return found


# ---- recognition

def _derive(found: Findings) -> None:
    found.read((Row("inner_dim", "cls_pred_heads.0.0.weight", columns, "columns"),))
    pattern = "cls_pred_heads.0.{i}.weight"
    convolutions = [shape for name, shape in found.shapes.items()
                    if name.startswith("cls_pred_heads.0.") and len(shape) == 4]
    if convolutions:
        found.add("num_conv_layers", len(convolutions), f"convolutions of {pattern}")


NETWORK = Network("discriminator", "the discriminator of PiD's distillation",
                  "cls_pred_heads.0.0.weight", rules, _derive,
                  undetermined=("feature_indices", "num_blocks"), licence=NVIDIA)
