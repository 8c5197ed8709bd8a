"""The configuration of a run: every key with its default, and the check before anything compiles.

Leaves are numbers, strings, booleans and tuples. A leaf that may be left unset is a
`config_dict.placeholder`. The sections `model`, `codec` and `text` hold a `name` and the options
of that thing; their builders check the options.
"""

import difflib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from ml_collections import ConfigDict, config_dict

from pid_jax import config_entries
from pid_jax.errors import UserError

OPEN_SECTIONS = ("model", "codec", "text")
DTYPES = ("float32", "bfloat16")

PERCEPTUAL = ("none", "lpips_vgg", "lpips_alex", "vgg16_bn")

# What a value may be, by its path; an unset leaf always may.
CHOICES = {
    "objective": ("pixeldit_t2i", "pixeldit_c2i", "pid_teacher", "pid_student", "jit_c2i",
                  "ditok_stage2"), "dtype": DTYPES, "ditok.perceptual": PERCEPTUAL,
    "param_dtype": DTYPES, "flow.prediction_type": ("velocity", "x0"),
    "flow.time_distribution": ("logit_normal", "uniform"),
    "sample.sampler": ("euler", "heun", "heun_exact", "flowdpm"),
    "sample.rule": ("ode", "sde_mean", "sde", "sde_preserve"),
    "distill.frozen_dtype": DTYPES,
    "distill.teacher_prediction_type": ("velocity", "x0"), "distill.sampler": ("ode", "sde"),
    "distill.input": ("teacher_forcing", "self_rollout")}
AT_LEAST = {
    1: ("total_steps", "data.batch_size", "data.image_size", "optim.accumulate",
        "checkpoint.every", "checkpoint.keep", "sample.every", "sample.steps", "sample.count",
        "sample.image_size", "log.every", "flow.dynamic_image_size", "repa.block",
        "distill.student_every", "distill.steps", "distill.discriminator.num_conv_layers",
        "lora.rank"),
    0: ("seed", "checkpoint.keep_every", "data.threads", "data.workers", "data.prefetch",
        "data.max_buckets",
        "optim.lr", "optim.weight_decay", "flow.logit_std", "flow.loss_weight", "flow.time_steps",
        "align.weight", "align.sigma_power", "align.y_weight", "align.chroma_weight",
        "repa.weight", "distill.vsd_weight",
        "distill.dsm_weight", "distill.gan_weight", "distill.gan_warm_up_steps",
        "distill.r1_weight", "distill.r1_alpha", "distill.fake_score.lr",
        "distill.fake_score.weight_decay", "distill.discriminator.lr",
        "distill.discriminator.weight_decay", "jit.p_std", "ditok.v_weight", "ditok.gamma_weight",
        "ditok.perceptual_weight")}
POSITIVE = ("lora.alpha", "optim.eps", "optim.clip_norm", "optim.skip_grad_norm_threshold",
            "flow.shift", "flow.dynamic_base_shift", "align.eps", "sample.shift",
            "sample.last_step", "jit.t_eps", "jit.noise_scale", "mesh.patience",
            "checkpoint.grace")
UNIT = ("data.caption_dropout", "noising.latent_dropout", "noising.apply_prob",
        "noising.clean_latent_ratio", "flow.sigma_min", "sample.sigma", "sample.last_step",
        "ema.decay", "distill.first_time", "distill.time_min", "distill.time_max",
        "jit.label_drop")
MAY_BE_INFINITE = ("optim.clip_norm", "optim.skip_grad_norm_threshold")
LISTS = {
    "data.sizes": str, "data.caption_fields": str, "data.sources": str, "sample.prompts": str,
    "optim.betas": float, "optim.warm_up_steps": int, "optim.cycle_lengths": int,
    "optim.f_start": float, "optim.f_max": float, "optim.f_min": float,
    "lora.targets": str, "init_fresh": str, "init_unused": str, "sample.more_weights": str,
    "sample.more_guidance": float, "sample.more_sizes": int, "sample.batches": str,
    "log.profile": int, "sample.guidance_interval": float, "distill.times": float,
    "distill.fake_score.betas": float, "distill.discriminator.feature_indices": int}


def base_config() -> ConfigDict:
    """Every key of a run with its default. Experiments in `configs/` change what they need."""
    return ConfigDict({
        "seed": 0,
        "total_steps": 1000,
        "objective": "pixeldit_t2i",
        "dtype": "float32",  # compute
        "param_dtype": "float32",  # parameters, optimizer and EMA
        "init_from": config_dict.placeholder(str),  # weights only, from step 0
        "init_fresh": (),  # path patterns of parameters that init_from may lack: they are drawn
        "init_unused": (),  # and of those in it that the network lacks: left out
        "resume": config_dict.placeholder(str),  # everything, from another run's folder
        "model": {"name": "pixeldit_t2i"},
        "codec": {"name": "dct"},
        "text": {"name": "hashed"},
        "data": _data(),
        "optim": _optim(),
        "ema": _ema(),
        "flow": _flow(),
        "noising": _noising(),
        "align": _align(),
        "distill": _distill(),
        "repa": _repa(),
        "jit": _jit(),
        "ditok": _ditok(),
        "lora": _lora(),
        "mesh": _mesh(),
        "attention": "auto",  # local kernel: auto, dense, chunked, splash (TPU), cudnn (GPU)
        "checkpoint": _checkpoint(),
        "sample": _sample(),
        "log": _log(),
    })


def _mesh() -> dict:
    return {
        "data": -1,  # -1: all devices that are left
        "fsdp": 1,  # divides the batch and the parameters
        "sequence": 1,  # divides the image tokens and the parameters
        "sequence_attention": "auto",  # ulysses, allgather or ulysses_allgather: parallel.sequence
        "patience": 1800.0,  # seconds that one of several processes waits for the others
    }


def _data() -> dict:
    return {
        # Folder written by `pid_jax.data.ingest`, or a registry: see pid_jax.data.sources.
        "path": config_dict.placeholder(str),
        "sources": (),  # which of a registry's; empty: all
        "batch_size": 8,  # global, of one optimizer update
        "image_size": 256,
        "buckets": "square",  # square, single, multi, custom: see pid_jax.data.buckets
        "sizes": (),  # for custom buckets: "384x256"
        "max_buckets": 0,  # most compiled sizes, the fullest; 0: all
        "shuffle": True,
        "remainder": "repeat",
        "crop": "center",
        "resize": "fit",
        "decode": "exact",  # or draft: JPEGs at a half, a quarter or an eighth where that suffices
        "flip": False,
        "permute_colours": False,
        "caption_fields": ("prompt", "prompt_medium", "prompt_short"),
        "caption_dropout": 0.1,
        "latents": "",  # folder of `pid_jax.embed_latents`, read instead of encoding pictures
        "strict": False,  # an unreadable picture ends the run instead of being replaced
        "threads": 2,
        "workers": 0,
        "prefetch": 2,
    }


def _optim() -> dict:
    return {
        "lr": 1e-4,
        "weight_decay": 0.0,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "clip_norm": 0.1,
        "force_finite": True,  # nan and inf in a gradient become 0
        "skip_on_nonfinite": True,  # a norm that is not finite drops the update
        "skip_grad_norm_threshold": config_dict.placeholder(float),  # drop updates above it
        "warm_up_steps": (0,),
        "cycle_lengths": (10_000_000,),
        "f_start": (1e-6,),
        "f_max": (1.0,),
        "f_min": (1.0,),
        "decay": "linear",
        "accumulate": 1,  # micro-batches of one update
    }


def _ema() -> dict:
    return {
        "enabled": True,
        "rate": 0.1,  # relative width of the power-function average called "ema"
        "iteration_shift": 0,
        "decay": config_dict.placeholder(float),  # "ema" decays constantly by this instead
        "others": (),  # further ones: ("slow", "power", 0.05), ("steady", "constant", 0.9999)
    }


def _jit() -> dict:
    return {
        "p_mean": -0.8,  # training times are sigmoid(N(p_mean, p_std)); 1 is clean
        "p_std": 0.8,
        "t_eps": 0.05,  # smallest divisor of a velocity
        "noise_scale": 1.0,
        "label_drop": 0.1,
    }


def _ditok() -> dict:
    return {
        "use_labels": False,  # classes from the data; else every picture is of no class
        "v_weight": 1.0,
        "gamma_weight": 0.0,
        "perceptual_weight": 0.0,
        "perceptual": "none",  # lpips_vgg, lpips_alex or vgg16_bn
        "perceptual_weights": config_dict.placeholder(str),  # its weight file
        "token_cache": config_dict.placeholder(str),  # made by `python -m pid_jax.tokens cache`
    }


def _checkpoint() -> dict:
    return {
        "every": 500,
        "keep": 3,  # newest ones
        "keep_every": 0,  # and all whose step this divides
        "best": "",  # and the best by a score of the samples of its step, such as "psnr_sample"
        "folder": config_dict.placeholder(str),  # gs://BUCKET/RUN; default: the workdir
        "grace": 300.0,  # seconds from SIGTERM after which the process ends, saved or not
    }


def _log() -> dict:
    return {
        "every": 10,
        "tensorboard": True,
        "wandb": "",  # project of Weights & Biases
        "profile": (),  # (first, last) step of a profile for TensorBoard, in workdir/profile
    }


def _flow() -> dict:
    return {
        "prediction_type": "velocity",
        "logit_mean": 0.0,
        "logit_std": 1.0,
        "time_distribution": "logit_normal",  # pixeldit_c2i: or "uniform"
        "time_steps": 0,  # pixeldit_t2i: whole-numbered times of a table this long; 0: continuous
        "sigma_min": 0.0,
        "shift": 6.0,  # used when dynamic_shift is off
        "dynamic_shift": False,
        "dynamic_base_shift": 6.0,
        "dynamic_image_size": 2048,  # sqrt(H W) at which the dynamic shift equals its base
        "loss_weight": 1.0,
    }


def _noising() -> dict:
    return {
        "enabled": False,
        "path": "flow",
        "apply_prob": 0.75,
        "clean_latent_ratio": 0.0,
        "add_sigma_min": 0.0,
        "add_sigma_max": 0.8,
        "latent_dropout": 0.0,  # chance that a sample's latent becomes zeros
        "overrides": (),  # (part of a record's source, sigma min, sigma max) each
    }


def _align() -> dict:
    return {
        "enabled": False,
        "weight": 0.8,
        "sigma_power": 1.0,
        "y_weight": 0.25,
        "chroma_weight": 1.0,
        "eps": 1e-3,
    }


def _lora() -> dict:
    return {
        "enabled": False,  # only the adapters train then
        "rank": 32,
        "alpha": 32.0,
        # Image stream and pixel blocks; regular expressions found in the paths of kernels.
        "targets": (r"/(qkv_x|proj_x|mlp_x/w[123]|mlp/fc[12])/kernel$",),
    }


def _distill() -> dict:
    return {
        "teacher": config_dict.placeholder(str),  # checkpoint; default: init_from
        "untrained_teacher": False,  # without either, a teacher drawn from the seed
        "frozen_dtype": "float32",  # storage of the teacher
        "teacher_prediction_type": "velocity",
        "teacher_guidance": 3.0,
        "student_every": 6,  # one student update, then student_every - 1 of the fake score
        "steps": 4,
        "times": (0.999, 0.866, 0.634, 0.342, 0.0),  # steps + 1 of them; empty: uniform
        "first_time": 1.0,  # of one step, and of uniform times
        "sampler": "sde",
        "input": "teacher_forcing",
        "time_min": 0.02,
        "time_max": 0.99,
        "vsd_weight": 1.0,
        "dsm_weight": 1.0,
        "gan_weight": 0.05,  # 0: no discriminator
        "gan_warm_up_steps": 100,  # updates of both phases
        "gan_same_noise": True,  # real and generated pictures share time and noise
        "r1_weight": 200.0,
        "r1_alpha": 0.1,
        "fake_score": {"lr": 1e-5, "weight_decay": 1e-3, "betas": (0.9, 0.999)},
        "discriminator": {
            "lr": 1e-5, "weight_decay": 0.0, "feature_indices": (7,), "num_conv_layers": 2,
            "patch_logits": False},
    }


def _repa() -> dict:
    return {
        "weight": 0.0,  # of the alignment with the frozen features of config.codec; 0: none
        "block": 8,  # the patch block whose tokens are aligned, counted from 1
    }


def _sample() -> dict:
    return {
        "every": 500,
        "steps": 50,
        "guidance": 2.75,
        "count": 4,
        "image_size": config_dict.placeholder(int),  # default: data.image_size
        "prompts": ("a photograph",),
        "negative_prompt": "",
        "heldout": config_dict.placeholder(str),  # default: pictures of data.path
        "sigma": 0.0,  # pid_teacher: noise level of the latents that are decoded
        "weights": "ema",
        # Each further value adds pictures: a sheet for weights and sizes, a column for guidance.
        "more_weights": (),
        "more_guidance": (),
        "more_sizes": (),
        "batches": (),  # files of pid_jax.fixed_batches (or folders), drawn on a sheet of their own
        "lpips": "",  # weights of LPIPS (VGG16, .safetensors or .npz): a further score
        # Of pixeldit_c2i, where time runs from 0 (noise) to 1 (clean):
        "sampler": "flowdpm",  # Adams-Bashforth; or euler, heun, heun_exact
        "rule": "ode",  # euler: or sde_mean, sde, sde_preserve
        "shift": config_dict.placeholder(float),  # default: flow.shift
        "last_step": config_dict.placeholder(float),  # default: 1 / steps
        "guidance_interval": (0.0, 1.0),  # guided where low < t < high
    }


def check_config(config: ConfigDict) -> None:
    """Refuses unknown or missing keys, wrong types and values out of range.

    Raises:
      UserError: one sentence that names the key, its value and what was expected.
    """
    _check_keys(config, base_config(), "config")
    _check_values(config)


def _check_keys(config: ConfigDict, schema: ConfigDict, where: str) -> None:
    for key in config:
        if key not in schema:
            raise UserError(unknown_key(f"{where}.{key}", schema))
    for key in schema:
        path = f"{where}.{key}"
        if key not in config:
            raise UserError(f"{path} is missing; start from pid_jax.config.base_config()")
        _check_entry(config, schema, key, path)


def _check_entry(config: ConfigDict, schema: ConfigDict, key: str, path: str) -> None:
    value, expected = config.get(key), schema.get_type(key)
    if not isinstance(schema.get(key), ConfigDict):
        if value is not None or schema.get(key) is not None:
            _check_type(value, expected, schema.get(key), path)
        if value == "" and schema.get(key) is None:
            raise UserError(f"{path} is empty; give it a value, or leave it out")
    elif not isinstance(value, ConfigDict):
        raise UserError(f"{path} is {value!r}; expected a section with keys")
    elif key not in OPEN_SECTIONS:
        _check_keys(value, schema[key], path)
    elif not isinstance(value.get("name"), str):
        raise UserError(f"{path}.name is {value.get('name')!r}; expected the name of a {key}")


def _check_type(value: Any, expected: type, default: Any, path: str) -> None:
    accepted = (int, float) if expected is float else expected
    wrong = not isinstance(value, accepted) or (isinstance(value, bool) and expected is not bool)
    if wrong:
        raise UserError(f"{path} is {value!r} ({type(value).__name__}); "
                        f"expected {expected.__name__}, such as {default!r}")


def unknown_key(path: str, section: ConfigDict) -> str:
    """The sentence for a key that a section does not have, with the nearest one that it has."""
    close = difflib.get_close_matches(path.rsplit(".", 1)[-1], list(section), n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(sorted(section))}"
    return f"{path} is not a known key; {hint}"


def _check_values(config: ConfigDict) -> None:
    _check_numbers(config.to_dict(), "config")
    for path, choices in CHOICES.items():
        _one_of(config, path, choices)
    for path, kind in LISTS.items():
        _check_list(config, path, kind)
    for least, paths in AT_LEAST.items():
        for path in paths:
            _in_range(config, path, lambda value: value >= least, f"at least {least}")
    for path in POSITIVE:
        _in_range(config, path, lambda value: value > 0, "a number above 0")
    for path in UNIT:
        _in_range(config, path, lambda value: 0 <= value <= 1, "a number from 0 to 1")
    _in_range(config, "seed", lambda value: value < 2**32, f"at most {2**32 - 1}")
    _in_range(config, "data.batch_size", lambda value: value <= 2**20, f"at most {2**20}")
    config_entries.check(config)


def _check_numbers(value: Any, path: str) -> None:
    """Refuses nan anywhere, and infinity where it does not mean "never"."""
    if isinstance(value, dict):
        for key in value:
            _check_numbers(value[key], f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        for entry in value:
            _check_numbers(entry, path)
    elif isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value) or path.removeprefix("config.") not in MAY_BE_INFINITE:
            raise UserError(f"{path} is {value}; expected a finite number")


def _check_list(config: ConfigDict, path: str, kind: type) -> None:
    accepted = (int, float) if kind is float else kind
    value = lookup(config, path)
    if not all(isinstance(entry, accepted) for entry in value):
        raise UserError(f"config.{path} is {value!r}; expected a tuple of {kind.__name__}")


def lookup(config: ConfigDict, path: str) -> Any:
    """The value at a dotted path such as `optim.lr`."""
    for part in path.split("."):
        config = config[part]
    return config


def _one_of(config: ConfigDict, path: str, choices: tuple[str, ...]) -> None:
    value = lookup(config, path)
    if value not in choices:
        raise UserError(f"config.{path} is {value!r}; expected one of {', '.join(choices)}")


def _in_range(config: ConfigDict, path: str, fits: Callable[[Any], bool], expected: str) -> None:
    value = lookup(config, path)
    if value is not None and not fits(value):
        raise UserError(f"config.{path} is {value!r}; expected {expected}")


def to_json(config: ConfigDict) -> str:
    """The resolved config as JSON text; tuples become lists, unset placeholders null."""
    return json.dumps(config.to_dict(), indent=2, sort_keys=True)


def from_json(text: str) -> ConfigDict:
    """The inverse of `to_json`."""
    return from_dict(json.loads(text))


def from_dict(plain: dict) -> ConfigDict:
    """A config from plain dicts: lists become tuples, None an unset leaf."""
    return ConfigDict(_tuples(plain))


def with_defaults(config: ConfigDict) -> ConfigDict:
    """The config of an earlier version: keys that came later get their defaults."""
    return from_dict(_filled(config.to_dict(), base_config().to_dict()))


def _filled(values: dict, defaults: dict) -> dict:
    sections = {key: _filled(values[key], default) for key, default in defaults.items()
                if key not in OPEN_SECTIONS and isinstance(default, dict)
                and isinstance(values.get(key), dict)}
    return defaults | values | sections


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def differences(old: ConfigDict, new: ConfigDict, sections: tuple[str, ...]) -> Iterator[str]:
    """Yields `path: old -> new` for every leaf that differs in the named top-level keys."""
    for section in sections:
        before, after = _leaves(old.get(section), section), _leaves(new.get(section), section)
        for path in sorted(before.keys() | after.keys()):
            if before.get(path) != after.get(path):
                yield f"config.{path}: {before.get(path)!r} -> {after.get(path)!r}"


def _leaves(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, (dict, ConfigDict)):
        return {path: value}
    return {k: v for key in value for k, v in _leaves(value[key], f"{path}.{key}").items()}
