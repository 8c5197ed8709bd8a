"""Class-conditional PixelDiT: its weights are recognised, there is no table yet."""

from tools.convert_torch_weights.licences import NVIDIA
from tools.convert_torch_weights.mappings.network import Findings, Network, Row
from tools.convert_torch_weights.mappings.pixeldit_t2i import SIZES

_ROWS = (*SIZES, Row("num_classes", "y_embedder.embedding_table.weight", lambda s: s[0] - 1,
                     "rows less the one for no class"))


def _derive(found: Findings) -> None:
    found.read(_ROWS)
    found.add_count("patch_depth", "patch_blocks.{i}.")
    found.add_count("pixel_depth", "pixel_blocks.{i}.")
    found.heads("num_groups", "hidden_size", "patch_blocks.0.attn.q_norm.weight")


NETWORK = Network("pixeldit_c2i", "class-conditional PixelDiT",
                  "y_embedder.embedding_table.weight", derive=_derive, licence=NVIDIA)
