"""The released PiD networks: what their weights' shapes cannot tell (golden F00, H01)."""

import dataclasses
from collections.abc import Mapping

from tools.convert_torch_weights.mappings.network import Recognised, Shapes

STEM = "lq_proj.latent_proj.0.weight"
_V1 = {"rope_mode": "ntk_aware", "rope_ref_h": 1024, "rope_ref_w": 1024,
       "lq_conv_padding_mode": "zeros", "sr_scale": 4, "latent_spatial_down_factor": 8,
       "lq_latent_unpatchify_factor": 1}
_V1PT5 = _V1 | {"rope_ref_h": 2048, "rope_ref_w": 2048, "lq_conv_padding_mode": "replicate"}
_COARSE = {"latent_spatial_down_factor": 16}


@dataclasses.dataclass(frozen=True)
class Release:
    """Released networks that share a structure.

    Attributes:
      version: "v1" or "v1.5".
      families: latent families that a network of this structure was released for.
      stem_channels: input channels of the LQ branch's first convolution.
      options: what the shapes cannot tell.
    """

    version: str
    families: tuple[str, ...]
    stem_channels: int
    options: Mapping[str, object]


RELEASES = (
    Release("v1", ("flux", "sd3"), 16, _V1),
    Release("v1", ("sdxl",), 4, _V1),
    Release("v1", ("flux2",), 128, _V1 | _COARSE),
    Release("v1", ("dinov2",), 768, _V1 | _COARSE),
    Release("v1", ("siglip",), 1152, _V1 | _COARSE | {"sr_scale": 8}),
    Release("v1.5", ("flux", "qwenimage"), 16, _V1PT5),
    Release("v1.5", ("flux2",), 32, _V1PT5 | _COARSE | {"lq_latent_unpatchify_factor": 2}),
)
FAMILIES = frozenset(family for release in RELEASES for family in release.families)
# Sizes of every released network, and of the LQ branch by version.
_SIZES = {"hidden_size": 1536, "patch_size": 16, "patch_depth": 14, "pixel_depth": 2}
_LQ_WIDTHS = {"v1": 512, "v1.5": 1024}


def has_released_sizes(recognised: Recognised) -> bool:
    """Whether the backbone is as large as the released ones."""
    return all(recognised.options.get(name) == size for name, size in _SIZES.items())


def version_of(recognised: Recognised, shapes: Shapes) -> str | None:
    """"v1" (a gate value per channel) or "v1.5" (one per token, and a gate on the pixel blocks)."""
    gate, pixel = (recognised.options.get(name) for name in ("lq_gate_type", "pit_lq_inject"))
    if gate == "sigma_aware_per_token_per_dim" and not pixel:
        return "v1"
    return "v1.5" if gate == "sigma_aware_per_token" and pixel else None


def families_of(recognised: Recognised, shapes: Shapes) -> tuple[str, ...]:
    """Latent families that fit the channels of the LQ branch; empty when none is known."""
    version, stem = version_of(recognised, shapes), shapes.get(STEM, (0, 0))
    return next((release.families for release in RELEASES
                 if release.version == version and release.stem_channels == stem[1]), ())


def undetermined_options(recognised: Recognised, shapes: Shapes) -> Mapping[str, object]:
    """The released values of the options that shapes cannot tell; empty for other networks."""
    options = recognised.options
    if not has_released_sizes(recognised):
        return {}
    version, stem = version_of(recognised, shapes), shapes.get(STEM, (0, 0))
    for release in RELEASES:
        if (release.version == version and release.stem_channels == stem[1]
                and options.get("lq_hidden_dim") == _LQ_WIDTHS[release.version]):
            cells = release.options["lq_latent_unpatchify_factor"] ** 2
            return {**release.options, "lq_latent_channels": stem[1] * cells}
    return {}


def title(recognised: Recognised, shapes: Shapes) -> str:
    """What the weights are, in words."""
    families = " or ".join(families_of(recognised, shapes)) or "unknown"
    version = version_of(recognised, shapes) or "of no released version"
    return (f"PiD {version} for {families} latents ({shapes.get(STEM, (0, 0))[1]} channels enter "
            "its LQ branch)")
