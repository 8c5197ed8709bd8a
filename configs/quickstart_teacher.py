"""Stage 2 of the quick-start chain: the PiD teacher, on the backbone of stage 1.

Paper: PiD, arXiv 2605.23902.

    python -m pid_jax.main --config=configs/quickstart_teacher.py --workdir=runs/chain/teacher \
        --config.init_from=runs/chain/finetune

Hardware: two CPU cores, minutes. Expect: `samples/` (bicubic | PiD in 25 guided steps | truth) show
the photographs. Beside `quickstart_pid.py` it has a backbone to start from, trains more evenly over
time, and draws with guidance: the student learns to do without.
"""

from ml_collections import ConfigDict

from configs.common import chain


def get_config(variant: str = "") -> ConfigDict:
    """The config; it has no variants."""
    config = chain.stage(800)
    config.sample.steps = 25
    return config
