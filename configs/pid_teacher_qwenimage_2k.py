"""Trains the PiD v1.5 teacher for Qwen-Image latents: 512 px latents to 2048 px pictures.

Paper: PiD, arXiv 2605.23902. Values: the reference's experiment
`pid_v1pt5_teacher_qwenimage_h1024_d4_fix_backbone_res_2048` (golden F00): the backbone is
the frozen text-to-image PixelDiT, only the LQ branch and its gates train.

    python -m pid_jax.main --config=configs/pid_teacher_qwenimage_2k.py --workdir=DIR \
        --config.data.path=PACKED --config.sample.heldout=PACKED2 \
        --config.init_from=CONVERTED --config.mesh.fsdp=8

CONVERTED is the text-to-image checkpoint after `python -m tools.convert_torch_weights convert`;
`lq_proj` and `pit_lq_gate` start fresh. Hardware: 8 accelerators of 16 GB and more.
Expect: `samples/` (bicubic | PiD | truth) follow the LQ picture's structure within a few thousand
steps; the reference trains 30,000.
Variants: `:offline` needs no download, `:debug` runs in minutes on a CPU (configs/README.md).
"""

from ml_collections import ConfigDict

from configs.common import reference, variants


def get_config(variant: str = "") -> ConfigDict:
    """The config; variants: "offline", "debug"."""
    return variants.apply(reference.pid_teacher("qwenimage", **reference.FLUX), variant)
