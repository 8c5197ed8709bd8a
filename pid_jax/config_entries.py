"""What types and ranges of single values do not tell: tuples, patterns, names, values that belong
together. Part of `config.check_config`."""

import re

from ml_collections import ConfigDict

from pid_jax.errors import UserError

AVERAGE_NAME = r"[A-Za-z][\w.-]*"
TAKEN_NAMES = ("params", "optimizer", "data", "config", "card", "fake_score", "discriminator",
               "net", "untrained", "batches")
"""What checkpoints, sheets of samples and `--which` call other things."""


def check(config: ConfigDict) -> None:
    """Raises UserError with one sentence for the first value that cannot be meant."""
    _check_pairs(config)
    _check_overrides(config)
    _check_patterns(config)
    _check_averages(config)
    _check_profile(config)
    _check_accumulation(config)


def _check_pairs(config: ConfigDict) -> None:
    """The tuples of which not every length will do, and the ends of ranges."""
    for path, betas in (("optim", config.optim.betas),
                        ("distill.fake_score", config.distill.fake_score.betas)):
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise UserError(f"config.{path}.betas is {betas!r}; expected two numbers, each at "
                            "least 0 and below 1")
    if not config.sample.prompts:
        raise UserError("config.sample.prompts is empty; give at least one, such as ('a cat',)")
    interval = config.sample.guidance_interval
    if len(interval) != 2 or not 0 <= interval[0] <= interval[1] <= 1:
        raise UserError(f"config.sample.guidance_interval is {interval!r}; expected two times "
                        "(low, high) with 0 <= low <= high <= 1")
    times = config.distill
    if times.time_min > times.time_max:
        raise UserError(f"config.distill.time_min is {times.time_min}, above config.distill."
                        f"time_max {times.time_max}; exchange them")


def _check_overrides(config: ConfigDict) -> None:
    for override in config.noising.overrides:
        if not (isinstance(override, tuple) and len(override) == 3 and isinstance(override[0], str)
                and all(isinstance(sigma, (int, float)) for sigma in override[1:])):
            raise UserError(f"config.noising.overrides holds {override!r}; expected (part of a "
                            "record's source, sigma min, sigma max)")


def _check_patterns(config: ConfigDict) -> None:
    for path, patterns in (("lora.targets", config.lora.targets), ("init_fresh", config.init_fresh),
                           ("init_unused", config.init_unused)):
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(f"config.{path} holds {pattern!r}, which is no regular expression "
                                f"({error})") from error
    if config.lora.enabled and not config.lora.targets:
        raise UserError("config.lora.targets is empty; name the kernels that get adapters, such as "
                        "('/qkv_x/kernel$',)")


def _check_averages(config: ConfigDict) -> None:
    for other in config.ema.others:
        if not (isinstance(other, tuple) and len(other) == 3 and isinstance(other[0], str)
                and other[1] in ("power", "constant") and isinstance(other[2], (int, float))
                and not isinstance(other[2], bool)):
            raise UserError(f"config.ema.others holds {other!r}; expected (name, 'power', rate) or "
                            "(name, 'constant', decay)")
        if not re.fullmatch(AVERAGE_NAME, other[0]) or other[0] in TAKEN_NAMES:
            raise UserError(f"config.ema.others calls an average {other[0]!r}; choose a name of "
                            f"letters, digits and _.- other than {', '.join(TAKEN_NAMES)}")
    known = {"params", *(other[0] for other in config.ema.others), "ema"}
    for name in (config.sample.weights, *config.sample.more_weights):
        if name not in known:
            raise UserError(f"config.sample.weights is {name!r}; expected one of "
                            f"{', '.join(sorted(known))}")


def _check_profile(config: ConfigDict) -> None:
    steps = config.log.profile
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        raise UserError(f"config.log.profile is {steps!r}; expected (first step, last step), "
                        "counted from 1")


def _check_accumulation(config: ConfigDict) -> None:
    batch, parts = config.data.batch_size, config.optim.accumulate
    if batch % parts:
        raise UserError(f"config.data.batch_size is {batch}, which config.optim.accumulate "
                        f"{parts} does not divide; choose a multiple of {parts}")
