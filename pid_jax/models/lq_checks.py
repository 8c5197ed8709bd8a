"""What can be wrong with the options and inputs of the LQ branch, said in sentences."""

from pid_jax.errors import UserError
from pid_jax.models.gates import gate_width
from pid_jax.models.spatial import check_padding_mode


def check_projection(p) -> None:
    """Raises UserError when the options of an `LqProjection` do not fit together."""
    check_padding_mode(p.conv_padding_mode)
    gate_width(p.gate_type, p.out_dim)
    if min(p.in_channels, p.latent_channels) < 0:
        raise UserError(f"lq_in_channels is {p.in_channels} and lq_latent_channels "
                        f"{p.latent_channels}; they must be at least 0")
    if not (p.in_channels or p.latent_channels):
        raise UserError("the LQ branch has no input: lq_latent_channels and lq_in_channels are both"
                        " 0, set at least one of them")
    if p.hidden_dim % 4 or p.hidden_dim < 4:
        raise UserError(f"lq_hidden_dim is {p.hidden_dim}, but its GroupNorm has 4 groups: choose a"
                        " multiple of 4")
    if p.num_res_blocks < 0:
        raise UserError(f"lq_num_res_blocks is {p.num_res_blocks}; it must be at least 0")
    _check_latent_options(p)
    _check_picture_options(p)


def _check_latent_options(p) -> None:
    if p.latent_unpatchify_factor < 1:
        raise UserError(f"lq_latent_unpatchify_factor is {p.latent_unpatchify_factor}; it must be "
                        "at least 1")
    if p.latent_channels % p.latent_unpatchify_factor**2:
        raise UserError(
            f"lq_latent_channels is {p.latent_channels}, but lq_latent_unpatchify_factor"
            f" {p.latent_unpatchify_factor} needs a multiple of {p.latent_unpatchify_factor**2}")
    if p.latent_channels and (p.ratio <= 0 or p.ratio < 1 and (1 / p.ratio).denominator != 1):
        raise UserError(
            f"one latent cell covers {p.ratio} patches (sr_scale {p.sr_scale} *"
            f" latent_spatial_down_factor {p.latent_spatial_down_factor} //"
            f" lq_latent_unpatchify_factor {p.latent_unpatchify_factor} / patch_size"
            f" {p.patch_size}); below 1 it must be 1/2, 1/3, 1/4, ...")


def _check_picture_options(p) -> None:
    if (p.in_channels or p.aux_rgb_head) and p.patch_size % p.sr_scale:
        raise UserError(f"patch_size {p.patch_size} is not a multiple of sr_scale {p.sr_scale},"
                        " which the LQ image branch and the aux RGB head need")
    tap = p.aux_rgb_head_latent_block_idx
    if p.aux_rgb_head and tap != -1 and not 1 <= tap <= p.num_res_blocks:
        raise UserError(f"lq_aux_rgb_head_latent_block_idx is {tap}; choose -1 (after the merge) or"
                        f" a ResBlock from 1 to lq_num_res_blocks = {p.num_res_blocks}")


def check_inputs(p, lq_latent, lq_image, with_rgb: bool) -> None:
    """Raises UserError when arrays given to an `LqProjection` do not fit its options."""
    _check_channels("lq_latent", lq_latent, "lq_latent_channels", p.latent_channels)
    _check_channels("lq_image", lq_image, "lq_in_channels", p.in_channels)
    if with_rgb:
        _check_rgb(p, lq_latent)


def _check_channels(name: str, x, option: str, channels: int) -> None:
    if x is None:
        return
    if x.ndim != 4:
        raise UserError(f"{name} has shape {x.shape}, expected [batch, height, width, channels]")
    if not channels:
        raise UserError(f"{name} was given to a network without that branch ({option} is 0): leave"
                        f" it out or build the network with {option}={x.shape[-1]}")
    if x.shape[-1] != channels:
        raise UserError(
            f"{name} has {x.shape[-1]} channels (shape {x.shape}), this network expects {channels}"
            f" ({option}): check that codec and checkpoint belong to one latent family, and that"
            " the channels come last")


def check_batches(**inputs) -> None:
    """Raises UserError unless all named inputs (None for one not given) have one batch size."""
    sizes = {name: value.shape[0] for name, value in inputs.items() if value is not None}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(f"batch sizes differ: {listed}; give every input as many samples")


def check_per_sample(**inputs) -> None:
    """Raises UserError unless each named input (None for one not given) is one value a sample."""
    for name, value in inputs.items():
        if value is not None and value.ndim != 1:
            raise UserError(f"{name} has shape {value.shape}, expected one value per sample: [B]")


def _check_rgb(p, lq_latent) -> None:
    if not p.aux_rgb_head:
        raise UserError("return_lq_aux needs the auxiliary head: build with lq_aux_rgb_head=True")
    if p.aux_rgb_head_latent_block_idx != -1 and lq_latent is None:
        raise UserError("the aux RGB head reads the latent branch (lq_aux_rgb_head_latent_block_idx"
                        f" {p.aux_rgb_head_latent_block_idx}): pass lq_latent")
