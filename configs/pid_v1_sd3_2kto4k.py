"""The released four-step PiD v1 for Stable Diffusion 3 latents, at 2048 to 4096 pixels.

Paper: PiD, arXiv 2605.23902. Values: the reference's experiment
`PiD_res2kto4k_sr4x_official_sd3_distill_4step` (golden F00).

    python -m tools.convert_torch_weights convert --config=configs/pid_v1_sd3_2kto4k.py \
        --src WEIGHTS --dst CONVERTED
    python -m pid_jax.decode --checkpoint CONVERTED --out drawn --input small.png

Variants: see configs/README.md; for trying the network out, since nothing is trained here.
"""

from ml_collections import ConfigDict

from configs.common import reference, variants


def get_config(variant: str = "") -> ConfigDict:
    """The config; variants: "offline", "debug"."""
    return variants.apply(reference.released_v1_up_to_4k("sd3", **reference.FLUX), variant)
