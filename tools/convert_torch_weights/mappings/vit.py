"""The vision transformers' names: DINOv2 with registers, SigLIP, and the decoders of RAE."""

from pid_jax.encoders.vit import MaeDecoder, Vit
from tools.convert_torch_weights.mappings.engine import Rule, affine, convolution, layer
from tools.convert_torch_weights.mappings.transforms import leading_ones


def dinov2(net: Vit) -> list[Rule]:
    """Hugging Face's `Dinov2WithRegistersModel`; its last norm and mask token are not used."""
    key, path = "encoder.layer.{i}", "blocks"
    return [Rule("embeddings.cls_token", "cls", leading_ones(2)),
            Rule("embeddings.register_tokens", "registers", leading_ones(1)),
            Rule("embeddings.position_embeddings", "position", leading_ones(1)),
            *convolution("embeddings.patch_embeddings.projection", "patch"),
            *affine(f"{key}.norm1", f"{path}/norm1"), *affine(f"{key}.norm2", f"{path}/norm2"),
            *_separate_attention(key, path),
            Rule(f"{key}.layer_scale1.lambda1", f"{path}/scale1"),
            Rule(f"{key}.layer_scale2.lambda1", f"{path}/scale2"),
            *layer(f"{key}.mlp.fc1", f"{path}/fc1"), *layer(f"{key}.mlp.fc2", f"{path}/fc2")]


def siglip(net: Vit) -> list[Rule]:
    """Hugging Face's `SiglipModel`, of which only the picture's side is used, up to its last norm."""
    top, key, path = "vision_model.embeddings", "vision_model.encoder.layers.{i}", "blocks"
    attention = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "proj"}
    found = [*convolution(f"{top}.patch_embedding", "patch"),
             Rule(f"{top}.position_embedding.weight", "position"),
             *affine(f"{key}.layer_norm1", f"{path}/norm1"),
             *affine(f"{key}.layer_norm2", f"{path}/norm2"),
             *layer(f"{key}.mlp.fc1", f"{path}/fc1"), *layer(f"{key}.mlp.fc2", f"{path}/fc2")]
    for theirs, ours in attention.items():
        found += layer(f"{key}.self_attn.{theirs}", f"{path}/{ours}")
    return found


def mae_decoder(net: MaeDecoder) -> list[Rule]:
    """The decoders of RAE and Scale-RAE."""
    key, path = "decoder_layers.{i}", "blocks"
    return [Rule("trainable_cls_token", "cls", leading_ones(2)),
            Rule("decoder_pos_embed", "position", leading_ones(1)),
            *layer("decoder_embed", "embed"), *affine("decoder_norm", "norm"),
            *layer("decoder_pred", "pred"), *_separate_attention(key, path),
            *affine(f"{key}.layernorm_before", f"{path}/norm1"),
            *affine(f"{key}.layernorm_after", f"{path}/norm2"),
            *layer(f"{key}.intermediate.dense", f"{path}/fc1"),
            *layer(f"{key}.output.dense", f"{path}/fc2")]


def _separate_attention(key: str, path: str) -> list[Rule]:
    found = layer(f"{key}.attention.output.dense", f"{path}/proj")
    for theirs, ours in (("query", "q"), ("key", "k"), ("value", "v")):
        found += layer(f"{key}.attention.attention.{theirs}", f"{path}/{ours}")
    return found
