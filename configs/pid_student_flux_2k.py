"""Distils the PiD v1.5 teacher for FLUX latents into a student of four steps, at 2048 pixels.

Paper: PiD, arXiv 2605.23902 (DMD2, arXiv 2405.14867). Values: the reference's experiment
`pid_v1pt5_student_flux_h1024_d4_res_2048_distill` (golden F00): every sixth update is the
student's, the others train the fake score and the discriminator on the teacher's features.

    python -m pid_jax.main --config=configs/pid_student_flux_2k.py --workdir=DIR \
        --config.data.path=PACKED --config.sample.heldout=PACKED2 \
        --config.init_from=TEACHER --config.mesh.fsdp=8

TEACHER is the workdir of the teacher's run, or its released weights after
`python -m tools.convert_torch_weights convert`; student and fake score start from it, and it stays
frozen beside them. Hardware: parameters, moments and averages of the four networks take 42 GB over
`fsdp` x `sequence`; 32 accelerators (fsdp 8 x sequence 4) of 16 GB and more.
Expect: `samples/` (bicubic | PiD | truth, four steps) stay sharp; the reference trains 3,000
updates.
Variants: `:offline` needs no download, `:debug` runs in minutes on a CPU (configs/README.md).
"""

from ml_collections import ConfigDict

from configs.common import reference, variants


def get_config(variant: str = "") -> ConfigDict:
    """The config; variants: "offline", "debug"."""
    return variants.apply(reference.pid_student("flux", **reference.FLUX), variant)
