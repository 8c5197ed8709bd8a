"""Trains the PiD v1.5 teacher for FLUX latents at 2048 pixels: 512 px latents to 2048 px pictures.

Paper: PiD, arXiv 2605.23902. Values: the reference's experiment
`pid_v1pt5_teacher_flux_h1024_d4_fix_backbone_res_2048` (golden F00): the backbone is the frozen
text-to-image PixelDiT, only the LQ branch and its gates train.

    python -m pid_jax.main --config=configs/pid_teacher_flux_2k.py --workdir=DIR \
        --config.data.path=PACKED --config.sample.heldout=PACKED2 \
        --config.init_from=CONVERTED --config.mesh.fsdp=8

CONVERTED is the text-to-image checkpoint after `python -m tools.convert_torch_weights convert`;
`lq_proj` and `pit_lq_gate` start fresh. Hardware: 8 accelerators of 16 GB and more.
Expect: `samples/` (bicubic | PiD | truth) follow the LQ picture's structure within a few thousand
steps; the reference trains 30,000.
Variant `configs/pid_teacher_flux_2k.py:offline`: DCT latents of the same shape and hashed words,
no download, no use but trying the run.
"""

from ml_collections import ConfigDict

from configs.common import reference


def get_config(variant: str = "") -> ConfigDict:
    """The config; variants: "offline"."""
    return reference.pid_teacher(variant, codec="flux", lq_latent_channels=16,
                                 latent_spatial_down_factor=8)
