"""Stage 3 of the quick-start chain: the student, which draws in four steps.

Paper: PiD, arXiv 2605.23902 (DMD2, arXiv 2405.14867).

    python -m pid_jax.main --config=configs/quickstart_student.py --workdir=runs/chain/student \
        --config.init_from=runs/chain/teacher

Hardware: two CPU cores, minutes. Expect: `samples/` (bicubic | student | truth) close to the
teacher's with 4 network calls instead of its 50. Every third update is the student's (in the
reference every sixth), so that few updates are enough.
"""

from ml_collections import ConfigDict

from configs.common import chain


def get_config(variant: str = "") -> ConfigDict:
    """The config; it has no variants."""
    config = chain.stage(300)
    config.objective = "pid_student"
    config.align.enabled = False
    config.optim.lr = 2e-4
    config.optim.weight_decay = 0.0
    config.optim.warm_up_steps = (10,)
    config.distill.student_every = 3
    config.distill.teacher_prediction_type = "x0"
    config.distill.teacher_guidance = chain.GUIDANCE
    config.distill.fake_score.update({"lr": 5e-4, "weight_decay": 0.0, "betas": (0.9, 0.99)})
    config.distill.discriminator.update({"lr": 5e-4, "feature_indices": (0,)})
    config.sample.steps = config.distill.steps
    return config
