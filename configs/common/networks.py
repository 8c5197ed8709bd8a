"""Options of the networks. The defaults are the released 1.3B model's."""

from ml_collections import config_dict

from pid_jax.errors import UserError


def pixeldit_t2i(**changes) -> dict:
    """Text-to-image PixelDiT, 1.30B parameters; `changes` replace options."""
    return _changed({
        "name": "pixeldit_t2i",
        "in_channels": 3,
        "hidden_size": 1536,
        "num_groups": 24,  # attention heads
        "patch_size": 16,
        "patch_depth": 14,
        "pixel_hidden_size": 16,
        "pixel_attn_hidden_size": 1152,
        "pixel_num_groups": 16,
        "pixel_depth": 2,
        "num_text_blocks": 4,
        "txt_embed_dim": 2304,
        "txt_max_length": 300,
        "use_text_rope": True,
        "text_rope_theta": 10000.0,
        "rope_mode": "original",
        "rope_ref_h": 2048,
        "rope_ref_w": 2048,
        "repa_encoder_index": 6,
        "enable_ed": False,
        "ed_compress_ratio": 1,
        "ed_depth_per_stage": 1,
        "ed_window_size": 2,
        "ed_num_heads": config_dict.placeholder(int),
        "ed_hidden_size": config_dict.placeholder(int),
        "ed_use_token_shuffle": True,
        "remat": "none",
        "unroll": 1,
        "pit_chunks": 1,
    }, changes)


def pidnet(**changes) -> dict:
    """PiD v1.5 (flux latents), 1.40B parameters; `changes` replace options."""
    backbone = pixeldit_t2i(name="pidnet", rope_mode="ntk_aware")
    return _changed(backbone | {
        "lq_inject_mode": "controlnet",
        "lq_in_channels": 0,
        "lq_latent_channels": 16,
        "lq_hidden_dim": 1024,
        "lq_num_res_blocks": 4,
        "lq_latent_unpatchify_factor": 1,
        "lq_aux_rgb_head": True,
        "lq_aux_rgb_head_latent_block_idx": -1,
        "lq_conv_padding_mode": "replicate",
        "lq_gate_type": "sigma_aware_per_token",
        "lq_interval": 2,
        "zero_init_lq": True,
        "train_lq_proj_only": True,
        "sr_scale": 4,
        "latent_spatial_down_factor": 8,
        "pit_lq_inject": True,
    }, changes)


def pixeldit_c2i(size: str = "xl", **changes) -> dict:
    """Class-conditional PixelDiT of a published size ("b", "l", "xl"); `changes` replace options.
    """
    return _changed({
        "name": "pixeldit_c2i",
        "in_channels": 3,
        "patch_size": 16,
        "pixel_hidden_size": 16,
        "num_classes": 1000,
        "use_pixel_abs_pos": True,
        "pit_adaln_post_modulation": False,
        "rope_mode": "original",
        "label_init_std": 0.02,
        "time_init_std": 0.02,
        "repa_features": 0,
        "repa_width": CLASS_SIZES[size]["hidden_size"],
        "remat": "none",
        "unroll": 1,
        **CLASS_SIZES[size],
    }, changes)


CLASS_SIZES = {
    "b": {"hidden_size": 768, "num_groups": 12, "patch_depth": 12, "pixel_depth": 2},
    "l": {"hidden_size": 1024, "num_groups": 16, "patch_depth": 22, "pixel_depth": 4},
    "xl": {"hidden_size": 1152, "num_groups": 16, "patch_depth": 26, "pixel_depth": 4},
}
"""Sizes of the class-conditional networks (PixelDiT paper, table 1): 185M, 570M, 797M."""

TINY = {
    "hidden_size": 192,
    "num_groups": 3,
    "patch_size": 8,
    "patch_depth": 4,
    "pixel_hidden_size": 8,
    "pixel_attn_hidden_size": 96,
    "pixel_num_groups": 2,
    "pixel_depth": 1,
    "txt_embed_dim": 64,
    "txt_max_length": 16,
    "rope_ref_h": 128,
    "rope_ref_w": 128,
    "repa_encoder_index": -1,
}
"""Changes that make either network small enough for minutes on a CPU."""


def _changed(options: dict, changes: dict) -> dict:
    if unknown := changes.keys() - options.keys():
        raise UserError(f"the network has no option {', '.join(sorted(unknown))}")
    return options | changes
