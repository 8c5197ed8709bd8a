"""The config check: unknown keys, types and values, each answered by one sentence."""

import pytest

from pid_jax import config as config_lib
from pid_jax.errors import UserError


def test_base_config_passes():
    config_lib.check_config(config_lib.base_config())


def test_json_round_trip_keeps_tuples_and_unset_leaves():
    config = config_lib.base_config()
    again = config_lib.from_json(config_lib.to_json(config))
    assert again.optim.betas == (0.9, 0.999)
    assert again.init_from is None
    assert not list(config_lib.differences(config, again, tuple(config)))
    config_lib.check_config(again)


@pytest.mark.parametrize("path, key, sentence", [
    ("optim", "weight_dekay", "config.optim.weight_dekay is not a known key; did you mean"),
    (None, "total_step", "did you mean 'total_steps'"),
    ("data", "qqq", "known keys:"),
])
def test_unknown_keys_are_named_with_the_nearest(path, key, sentence):
    config = config_lib.base_config()
    section = config[path] if path else config
    with config.unlocked():
        section[key] = 1
    with pytest.raises(UserError, match=sentence):
        config_lib.check_config(config)


@pytest.mark.parametrize("path, value, sentence", [
    ("optim.lr", "fast", "config.optim.lr is 'fast' .str.; expected float"),
    ("total_steps", 2.5, "expected int"),
    ("total_steps", True, "expected int"),
    ("total_steps", 0, "expected at least 1"),
    ("objective", "gan", "expected one of pixeldit_t2i, "),
    ("dtype", "float16", "expected one of float32, bfloat16"),
    ("noising.apply_prob", 1.5, "expected a number from 0 to 1"),
    ("init_from", 3, "expected str"),
    ("model", 3, "expected a section"),
    ("codec.name", 3, "expected the name of a codec"),
    ("optim.lr", float("inf"), "config.optim.lr is inf; expected a finite number"),
    ("sample.guidance", float("nan"), "config.sample.guidance is nan"),
    ("optim.clip_norm", float("nan"), "config.optim.clip_norm is nan"),
    ("flow.shift", 0.0, "config.flow.shift is 0.0; expected a number above 0"),
    ("seed", 2**32, "config.seed is 4294967296; expected at most 4294967295"),
    ("data.batch_size", 10**9, "config.data.batch_size is 1000000000; expected at most 1048576"),
    ("sample.sigma", 2.0, "expected a number from 0 to 1"),
    ("sample.image_size", 0, "expected at least 1"),
    ("data.threads", -1, "expected at least 0"),
    ("data.sizes", (32,), "expected a tuple of str"),
    ("optim.betas", (0.9,), "expected two numbers"),
    ("optim.betas", (1.5, 2.0), "expected two numbers, each at least 0 and below 1"),
    ("optim.warm_up_steps", ("a",), "expected a tuple of int"),
    ("noising.overrides", (("a",),), "expected .part of a record's source, sigma min, sigma max"),
    ("noising.overrides", (("a", "b", 0.1),), "expected .part of a record's source"),
    ("sample.prompts", (), "give at least one"),
    ("resume", "", "config.resume is empty; give it a value, or leave it out"),
    ("distill.teacher", "", "config.distill.teacher is empty"),
    ("ema.others", (("a", "constant", True),), "expected .name, 'power', rate. or"),
    ("distill.time_min", 1.0, "config.distill.time_min is 1.0, above config.distill.time_max 0.99"),
    ("init_fresh", ("(",), "config.init_fresh holds '.', which is no regular expression"),
    ("lora.targets", ("*",), "config.lora.targets holds '.', which is no regular expression"),
    ("lora", {"enabled": True, "rank": 4, "alpha": 4.0, "targets": ()}, "lora.targets is empty"),
    ("ema.others", (("../x", "power", 0.1),), "calls an average '../x'; choose a name of letters"),
    ("ema.others", (("params", "power", 0.1),), "calls an average 'params'; choose a name"),
    ("ema.others", (("a", "square", 0.1),), "expected .name, 'power', rate. or"),
    ("log.profile", (5, 3), "config.log.profile is .5, 3.; expected .first step, last step."),
    ("log.profile", (0, 3), "config.log.profile is .0, 3."),
])
def test_wrong_types_and_values(path, value, sentence):
    plain = config_lib.base_config().to_dict()
    *sections, key = path.split(".")
    section = plain
    for name in sections:
        section = section[name]
    section[key] = value
    with pytest.raises(UserError, match=sentence):
        config_lib.check_config(config_lib.from_dict(plain))


def test_infinity_where_it_means_never():
    config = config_lib.base_config()
    config.optim.clip_norm = float("inf")
    config.noising.overrides = (("flux", 0, 0.5),)
    config_lib.check_config(config)


def test_an_earlier_version_gets_the_defaults_of_later_keys():
    plain = config_lib.base_config().to_dict()
    plain["optim"] = {"lr": 0.5}
    plain["model"] = {"name": "pidnet"}
    del plain["seed"], plain["log"]
    config = config_lib.with_defaults(config_lib.from_dict(plain))
    config_lib.check_config(config)
    assert (config.optim.lr, config.optim.eps, config.seed) == (0.5, 1e-8, 0)
    assert config.model.to_dict() == {"name": "pidnet"}


def test_missing_key():
    plain = config_lib.base_config().to_dict()
    del plain["optim"]["lr"]
    with pytest.raises(UserError, match="config.optim.lr is missing"):
        config_lib.check_config(config_lib.from_dict(plain))


def test_accumulation_must_divide_the_batch():
    config = config_lib.base_config()
    config.data.batch_size, config.optim.accumulate = 6, 4
    with pytest.raises(UserError, match="batch_size is 6, which config.optim.accumulate 4"):
        config_lib.check_config(config)
