"""The released four-step PiD v1 for FLUX.2 latents, at 2048 pixels.

Paper: PiD, arXiv 2605.23902. Values: the reference's experiment
`PiD_res2k_sr4x_official_flux2_distill_4step` (golden F00).

    python -m tools.convert_torch_weights convert --config=configs/pid_v1_flux2_2k.py \
        --src WEIGHTS --dst CONVERTED
    python -m pid_jax.decode --checkpoint CONVERTED --out drawn --input small.png

Variants: see configs/README.md; for trying the network out, since nothing is trained here.
"""

from ml_collections import ConfigDict

from configs.common import reference, variants


def get_config(variant: str = "") -> ConfigDict:
    """The config; variants: "offline", "debug"."""
    config = reference.released_v1("flux2", lq_latent_channels=128, latent_spatial_down_factor=16)
    return variants.apply(config, variant)
