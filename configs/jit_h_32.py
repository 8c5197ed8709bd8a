"""JiT-H/32 on ImageNet at 512 px: a plain transformer that predicts clean pixels.

Paper: JiT, arXiv 2511.13720. Pack ImageNet with the number of the class as caption
(docs/ditok.md), then

    python -m pid_jax.main --config=configs/jit_h_32.py --workdir=runs/jit_h_32

Hardware: accelerators. `--config=configs/jit_h_32.py:debug` takes 25 steps of
a tiny network on two CPU cores. Nobody has run the full training with this project.
"""

from ml_collections import ConfigDict

from configs.common import jit


def get_config(variant: str = "") -> ConfigDict:
    """The config; variants: "offline", "debug"."""
    return jit.class_conditional(variant, "h", 32)
