"""Gemma-2 as Hugging Face names it, without the prefix `model.`."""

from pid_jax.encoders.gemma2 import Gemma2
from tools.convert_torch_weights.mappings.engine import Rule
from tools.convert_torch_weights.mappings.transforms import linear

_LINEAR = {"self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v",
           "self_attn.o_proj": "o", "mlp.gate_proj": "gate", "mlp.up_proj": "up",
           "mlp.down_proj": "down"}
_NORMS = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_attention_norm",
          "pre_feedforward_layernorm": "pre_mlp_norm", "post_feedforward_layernorm": "post_mlp_norm"}


def rules(net: Gemma2) -> list[Rule]:
    """The rules of a network with these options."""
    key = "layers.{i}"
    return [Rule("embed_tokens.weight", "embedding"), Rule("norm.weight", "norm/scale"),
            *(Rule(f"{key}.{theirs}.weight", f"layers/{ours}/kernel", linear())
              for theirs, ours in _LINEAR.items()),
            *(Rule(f"{key}.{theirs}.weight", f"layers/{ours}/scale")
              for theirs, ours in _NORMS.items())]
