"""What is trained: one file each. `build` makes the objective of a config and checks its parts."""

import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from pid_jax import encoders, models
from pid_jax.data.token_cache import TokenCache
from pid_jax.encoders import perceptual
from pid_jax.encoders.repa_teacher import check_teacher
from pid_jax.errors import UserError
from pid_jax.models.lora import AdaptedNet
from pid_jax.objectives.base import Objective, make_lora
from pid_jax.objectives.ditok_stage2 import DiTokStage2
from pid_jax.objectives.jit_c2i import JitC2I
from pid_jax.objectives.pid_student import PidStudent
from pid_jax.objectives.pid_teacher import PidTeacher
from pid_jax.objectives.pixeldit_c2i import PixelDitC2I
from pid_jax.objectives.pixeldit_t2i import PixelDitT2I
from pid_jax.parallel.mesh import single_device
from pid_jax.parallel.sequence import make_attention, make_constrain

MODEL_OF = {"pixeldit_t2i": "pixeldit_t2i", "pixeldit_c2i": "pixeldit_c2i",
            "pid_teacher": "pidnet", "pid_student": "pidnet",
            "jit_c2i": "jit", "ditok_stage2": "ditok"}


def build(config: ConfigDict, mesh: Mesh | None = None, drawing: bool = False) -> Objective:
    """Makes the network, the encoders and the objective that use them.

    Args:
      mesh: where the network will run; None: the first device alone.
      drawing: without the files that only a training reads.
    Raises:
      UserError: a name or option is unknown, or the parts do not fit each other; found before
        anything compiles.
    """
    check_model_name(config)
    mesh = single_device() if mesh is None else mesh
    net = models.build_model(
        dtype=jnp.dtype(config.dtype), param_dtype=jnp.dtype(config.param_dtype),
        attention=make_attention(mesh, config.attention, config.mesh.sequence_attention),
        constrain=make_constrain(mesh), **config.model)
    if config.objective == "pixeldit_c2i":
        return PixelDitC2I(config, adapted(config, net), build_teacher(config, net))
    if config.objective == "jit_c2i":
        return JitC2I(config, adapted(config, net))
    if config.objective == "ditok_stage2":
        net = adapted(config, net)
        return DiTokStage2(config, net) if drawing else build_ditok(config, net)
    text = encoders.build_text_encoder(**config.text)
    check_text(net, text)
    if config.objective == "pixeldit_t2i":
        return PixelDitT2I(config, adapted(config, net), text, build_teacher(config, net))
    codec = encoders.build_codec(**config.codec)
    check_codec(net, codec)
    if config.objective == "pid_teacher":
        return PidTeacher(config, adapted(config, net), text, codec)
    # Nothing trains the auxiliary head in distillation.
    net = adapted(config, net.clone(lq_aux_rgb_head=False))
    return PidStudent(config, net, build_discriminator(config), text, codec)


def adapted(config: ConfigDict, net):
    """The network, with low-rank adapters where the config asks for them."""
    return AdaptedNet(net, make_lora(config.lora)) if config.lora.enabled else net


def build_discriminator(config: ConfigDict) -> models.Discriminator:
    """The discriminator on the features of the teacher's patch blocks."""
    options = config.distill.discriminator
    return models.build_model(
        "discriminator", inner_dim=config.model.hidden_size, num_blocks=config.model.patch_depth,
        feature_indices=options.feature_indices, num_conv_layers=options.num_conv_layers,
        patch_logits=options.patch_logits, dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype))


def build_teacher(config: ConfigDict, net):
    """The frozen encoder of REPA, by `config.codec`; None where its weight is 0."""
    if bool(config.repa.weight) != bool(net.repa_features):
        raise UserError(f"config.repa.weight is {config.repa.weight} and config.model."
                        f"repa_features {net.repa_features}; REPA needs both above 0, and a "
                        "network without it has both 0")
    if not config.repa.weight:
        return None
    if config.repa.block > net.patch_depth:
        raise UserError(f"config.repa.block is {config.repa.block}, but the network has "
                        f"{net.patch_depth} patch blocks; choose one of them, counted from 1")
    teacher = encoders.build_codec(**config.codec)
    check_teacher(teacher, net.repa_features)
    return teacher


def build_ditok(config: ConfigDict, net: models.DiTok) -> DiTokStage2:
    """DiTok's second stage with its perceptual distance and its cached tokens."""
    options = config.ditok
    if (options.gamma_weight > 0) != net.gamma_head:
        raise UserError(f"config.ditok.gamma_weight is {options.gamma_weight} and "
                        f"config.model.gamma_head is {net.gamma_head}; the head exists exactly "
                        "where its loss has a weight above 0")
    if (options.perceptual_weight > 0) != (options.perceptual != "none"):
        raise UserError(f"config.ditok.perceptual is {options.perceptual!r} with the weight "
                        f"{options.perceptual_weight}; set both, or 'none' and 0")
    distance = None
    if options.perceptual != "none":
        distance = perceptual.load_distance(options.perceptual, options.perceptual_weights)
    cache = None
    if options.token_cache:
        cache = TokenCache.open(options.token_cache, config.data, net)
    return DiTokStage2(config, net, distance, cache)


def check_model_name(config: ConfigDict) -> None:
    """Refuses a model that the objective does not train."""
    expected = MODEL_OF[config.objective]
    if config.model.name != expected:
        raise UserError(f"config.objective {config.objective!r} trains the model {expected!r}, "
                        f"but config.model.name is {config.model.name!r}")


def check_text(net, text) -> None:
    """Refuses a text encoder whose embeddings the network cannot read."""
    if text.width != net.txt_embed_dim:
        raise UserError(f"the text encoder makes embeddings of width {text.width}, the network "
                        f"reads {net.txt_embed_dim} (config.model.txt_embed_dim); make them equal")
    if text.length > net.txt_max_length:
        raise UserError(f"the text encoder makes {text.length} tokens, the network reads at most "
                        f"{net.txt_max_length} (config.model.txt_max_length); make them equal")


def check_codec(net, codec) -> None:
    """Refuses a codec of another latent family than the network's."""
    if codec.channels != net.lq_latent_channels:
        raise UserError(f"the codec {codec.family!r} makes latents of {codec.channels} channels, "
                        f"the network reads {net.lq_latent_channels} "
                        "(config.model.lq_latent_channels); choose the codec of its family")
    if codec.spatial_factor != net.latent_spatial_down_factor:
        raise UserError(f"a latent cell of the codec {codec.family!r} covers "
                        f"{codec.spatial_factor} pixels, the network expects "
                        f"{net.latent_spatial_down_factor} "
                        "(config.model.latent_spatial_down_factor); choose the codec of its family")
