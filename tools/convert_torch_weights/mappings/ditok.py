"""DiTok: a frozen TiTok encoder and quantizer, and a diffusion decoder that is a JiT."""

from collections.abc import Callable, Mapping

import numpy as np

from pid_jax.models.ditok import DiTok
from tools.convert_torch_weights.mappings import jit, titok
from tools.convert_torch_weights.mappings.engine import Rule, layer
from tools.convert_torch_weights.mappings.network import Findings, Network, Recognised, Shapes

KEY, PATH = "diffusion_decoder.", "diffusion_decoder/"
LATENT_POSITIONS = "latent_token_positional_embedding"


def rules(net: DiTok) -> list[Rule]:
    """The rules of a network with these options."""
    return [*titok.tokenizer("quantizer"), *jit.decoder(net.dims, KEY, PATH),
            *layer(f"{KEY}decoder_embed", f"{PATH}decoder_embed"),
            Rule(f"{KEY}{LATENT_POSITIONS}", f"{PATH}{LATENT_POSITIONS}"),
            *layer(f"{KEY}gamma_head", f"{PATH}gamma_head")]


def constants(net: DiTok) -> dict[str, Callable[[], np.ndarray]]:
    """The fixed embedding of the patches."""
    return {f"{KEY}pos_embed": lambda: jit.positions(net.dims)}


# ---- recognition

_SIZE = ("hidden_size", "depth", "num_heads", "bottleneck_dim")


def _derive(found: Findings) -> None:
    titok.derive_tokenizer(found, "quantizer")
    jit.derive_decoder(found, KEY)
    size = tuple(found.options.pop(name, 0) for name in _SIZE)
    found.add("vit_dec_dims", size, "width, depth, heads and bottleneck of the decoder")
    found.add_presence("gamma_head", f"{KEY}gamma_head.weight")


def _released(found: Recognised, shapes: Shapes) -> Mapping[str, object]:
    return {"in_context_start": 0, **titok.released_tokenizer(found, shapes)}


NETWORK = Network("ditok", "DiTok", f"{KEY}decoder_embed.weight", rules, _derive,
                  undetermined=(*titok.UNDETERMINED, "in_context_start"), released=_released,
                  objective="ditok_stage2", constants=constants)
