"""The frozen encoders' tables: one network each, with every naming that its files come in."""

import dataclasses
import re
from collections.abc import Callable, Collection
from typing import Any

import jax

from pid_jax.errors import UserError
from pid_jax.models import init_parameters
from tools.convert_torch_weights.mappings import autoencoder, gemma2, vit
from tools.convert_torch_weights.mappings.engine import Rule, Table, make_table


@dataclasses.dataclass(frozen=True)
class Naming:
    """One way in which files name a network's tensors.

    Attributes:
      rules: of a network.
      mark: a key that only files of this naming have.
      unused: pattern of the keys that the files have and the network does not need.
    """

    rules: Callable[[Any], list[Rule]]
    mark: str
    unused: str = r"(?!)"


NAMINGS = {
    "ldm": Naming(autoencoder.ldm, "encoder.mid.block_1.conv1.weight",
                  r"bn\.num_batches_tracked"),
    "diffusers": Naming(autoencoder.diffusers, "encoder.mid_block.attentions.0.to_q.weight",
                        r"bn\.num_batches_tracked"),
    "wan2d": Naming(autoencoder.wan2d, "encoder.middle.0.residual.2.weight"),
    "diffusers3d": Naming(autoencoder.diffusers3d, "encoder.mid_block.attentions.0.to_qkv.weight",
                          r".*\.time_conv\..*"),
    "gemma2": Naming(gemma2.rules, "layers.0.pre_feedforward_layernorm.weight",
                     r"lm_head\.weight"),
    "dinov2": Naming(vit.dinov2, "encoder.layer.0.layer_scale1.lambda1",
                     r"layernorm\.(weight|bias)|embeddings\.mask_token"),
    "siglip": Naming(vit.siglip, "vision_model.encoder.layers.0.layer_norm1.weight",
                     r"text_model\..*|logit_(scale|bias)|vision_model\.(post_layernorm|head)\..*"),
    "mae_decoder": Naming(vit.mae_decoder, "decoder_layers.0.layernorm_before.weight"),
}


def naming_of(keys: Collection[str]) -> str | None:
    """The naming of a file with these keys, or None when it is none that is known."""
    return next((name for name, naming in NAMINGS.items() if naming.mark in keys), None)


def encoder_table(net: Any, naming: str) -> Table:
    """The table of an encoder's network under a naming; allocates no parameters."""
    abstract = jax.eval_shape(lambda key: init_parameters(net, key), jax.random.key(0))
    return make_table(naming, NAMINGS[naming].rules(net), abstract)


def used(naming: str, keys: Collection[str]) -> list[str]:
    """The keys that a network of this naming needs."""
    unused = re.compile(NAMINGS[naming].unused)
    return [key for key in keys if not unused.fullmatch(key)]


def known_naming(keys: Collection[str], where: str) -> str:
    """As `naming_of`; UserError for an unknown one."""
    naming = naming_of(keys)
    if naming is None:
        first = ", ".join(sorted(keys)[:3])
        raise UserError(f"{where}: the weights are of no encoder that is known here (its names "
                        f"begin with {first}); known namings: {', '.join(NAMINGS)}")
    return naming
