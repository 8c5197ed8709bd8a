"""The released four-step PiD v1.5 for FLUX.2 latents, at 2048 to 4096 pixels.

Paper: PiD, arXiv 2605.23902. Values: the reference's experiment
`PiD_v1pt5_res2kto4k_sr4x_official_flux2_distill_4step` (golden F00).

    python -m tools.convert_torch_weights convert --config=configs/pid_v1pt5_flux2_2kto4k.py \
        --src WEIGHTS --dst CONVERTED
    python -m pid_jax.decode --checkpoint CONVERTED --out drawn --input small.png

Variants: see configs/README.md; for trying the network out, since nothing is trained here.
"""

from ml_collections import ConfigDict

from configs.common import reference, variants


def get_config(variant: str = "") -> ConfigDict:
    """The config; variants: "offline", "debug"."""
    return variants.apply(reference.released("flux2", **reference.FLUX2), variant)
