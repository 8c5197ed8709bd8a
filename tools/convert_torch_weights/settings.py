"""The config of converted weights: a config file, or a model's name and what its weights tell."""

import functools
import importlib
import json
import pkgutil
from collections.abc import Mapping
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from pid_jax import config as config_lib
from pid_jax.errors import UserError, one_line
from tools.convert_torch_weights.mappings import NETWORKS, Table, convertible_networks, table_for
from tools.convert_torch_weights.mappings.releases import FAMILIES
from tools.convert_torch_weights.recognise import Recognised, Shapes, recognise, title

_GEMMA = {"name": "gemma2", "width": 2304, "length": 300}


def config_of_file(path: str, changes: Mapping[str, str]) -> ConfigDict:
    """Loads a config file (`.py` with get_config, or a run's `.json`) and applies `--set` changes.

    Raises:
      UserError: the file cannot be loaded, or has no such key.
    """
    if path.endswith(".json"):
        try:
            config = config_lib.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"the config {path} cannot be read: {error}") from error
        return _changed(config, changes)
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values)
    try:
        values(["", f"--config={path}"])
        values["config"].value.to_dict()  # a file that cannot be loaded raises at its first use
        return _changed(values["config"].value, changes)
    except (OSError, ImportError, SyntaxError, TypeError, flags.Error) as error:
        reason = one_line(error)
        raise UserError(f"the config {path} cannot be loaded: {reason}") from error


def config_of_model(src: str, model: str, shapes: Shapes, changes: Mapping[str, str]) -> ConfigDict:
    """A config for weights of a network: options from their shapes, from the released networks of
    that structure, and from `changes`.

    Raises:
      UserError: weights of another network, or options that are told by none of these.
    """
    found = recognise(shapes)
    if found.model != model:
        raise UserError(f"{src}: the weights are {title(found, shapes)}, not those of {model}; "
                        "name the right --model, or a --config to start another network from them")
    network = NETWORKS[model]
    config = config_lib.base_config()
    config.model = ConfigDict({"name": model, **found.options,
                               **network.released(found, shapes)})
    config.objective = network.objective or config.objective
    if config.model.get("txt_embed_dim") == _GEMMA["width"]:
        config.text = ConfigDict(_GEMMA)
    if network.families:
        config.codec = ConfigDict({"name": "/".join(network.families(found, shapes)) or "?"})
    config = _changed(config, changes)
    _refuse_unknown_options(src, config, network.undetermined)
    network.complete(config.model, shapes)
    return config


def _refuse_unknown_options(src: str, config: ConfigDict, undetermined: tuple[str, ...]) -> None:
    open_options = [f"model.{name}" for name in undetermined if name not in config.model]
    family = config.codec.name
    if "/" in family:
        raise UserError(f"{src}: the weights fit the latents of {family.replace('/', ' and of ')}, "
                        "and nothing in them tells which: add --set codec.name=NAME")
    if family == "?":
        open_options.append("codec.name")
    if open_options:
        raise UserError(f"{src}: the shapes of the weights do not tell {', '.join(open_options)}: "
                        "name a --config, or add --set NAME=VALUE for each")


def _changed(config: ConfigDict, changes: Mapping[str, str]) -> ConfigDict:
    """Applies `a.b=value`; a key without a dot is an option of the model."""
    for key, text in changes.items():
        *parents, name = (key if "." in key else f"model.{key}").split(".")
        section = config
        for parent in parents:
            if not isinstance(section.get(parent), ConfigDict):
                raise UserError(f"--set {key}={text}: the config has no section {parent!r}")
            section = section[parent]
        with section.ignore_type(), section.unlocked():
            section[name] = _value(text)
    return config


def _value(text: str):
    try:
        value = json.loads(text)
    except ValueError:
        value = {"True": True, "False": False, "None": None}.get(text, text)
    return tuple(value) if isinstance(value, list) else value


def refuse_family(src: str, config: ConfigDict, shapes: Shapes) -> None:
    """Raises UserError when the config's codec is that of latents which the weights do not decode.

    Codecs of this project's own (such as `dct`) are not known here, and pass.
    """
    found, network = recognise(shapes), NETWORKS.get(config.model.name)
    if network is None or network.families is None or found.model != network.name:
        return
    fitting = network.families(found, shapes)
    if fitting and config.codec.name in FAMILIES and config.codec.name not in fitting:
        raise UserError(f"{src}: the weights are {title(found, shapes)}, but the config's latents "
                        f"are {config.codec.name} (codec.name); {fitting_configs(found, shapes)}")


def model_options(config: ConfigDict) -> tuple[str, dict]:
    """The network's name and its options."""
    options = config.model.to_dict()
    return options.pop("name"), options


def table_of(config: ConfigDict) -> Table:
    """The table of a config's network; tables are kept, since making one traces the network."""
    return _table(json.dumps(model_options(config)))


@functools.lru_cache(maxsize=4)
def _table(network: str) -> Table:
    name, options = json.loads(network)
    return table_for(name, {key: tuple(value) if isinstance(value, list) else value
                            for key, value in options.items()})


def fitting_configs(found: Recognised, shapes: Shapes) -> str:
    """A sentence with the configs of `configs/` that describe a network of exactly these shapes."""
    names = [name for name in _config_names() if _fits(name, found, shapes)]
    if names:
        return f"configs that fit: {', '.join(f'configs/{name}.py' for name in names)}"
    convertible = found.model in convertible_networks()
    return f"no file in configs/ fits; try --model {found.model}" if convertible else ""


def _config_names() -> list[str]:
    try:
        package = importlib.import_module("configs")
    except ImportError:
        return []
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg)


def _fits(name: str, found: Recognised, shapes: Shapes) -> bool:
    config = importlib.import_module(f"configs.{name}").get_config()
    model, options = model_options(config)
    if model != found.model or any(options.get(k, v) != v for k, v in found.options.items()):
        return False
    return table_of(config).shapes() == dict(shapes)
