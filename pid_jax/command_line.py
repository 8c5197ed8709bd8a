"""What the commands share: exit codes, errors on stderr, and sentences for mistyped flags."""

import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from pid_jax.config import unknown_key
from pid_jax.errors import RunFailed, UserError


def run(main: Callable[[], None], argv: Sequence[str]) -> int:
    """Parses absl flags, calls `main` and returns the exit code; `--help` explains them.

    0: the job is done. 2: bad input (`UserError`, or a flag that is wrong). `RunFailed` carries
    its own code. Anything else is a fault of this program: its traceback is printed, code 1.
    """
    if {"-h", "-help", "--help"} & set(argv):
        print(sys.modules[main.__module__].__doc__, flags.FLAGS.main_module_help(), sep="\n")
        return 0
    try:
        parse_flags(argv)
        main()
    except UserError as error:
        return fail(str(error), 2)
    except RunFailed as error:
        return fail(str(error), error.exit_code)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def fail(sentence: str, code: int) -> int:
    """Prints `error: <sentence>` on stderr and returns `code`."""
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    return code


def parse_flags(argv: Sequence[str]) -> None:
    """Parses absl flags; a mistake becomes a `UserError` of one sentence."""
    if "config" in flags.FLAGS:
        check_config_flags(argv[1:])
    try:
        rest = flags.FLAGS(list(argv))
    except flags.Error as error:
        raise UserError(_one_line(error)) from error
    if rest[1:]:
        raise UserError(f"{rest[1]!r} is not a flag; options start with --")


def check_config_flags(arguments: Sequence[str]) -> None:
    """Refuses a config that cannot be loaded and overrides `--config.a.b=v` of unknown keys.

    ml_collections answers these with its own tracebacks, so they are looked at first.
    """
    config = None
    for position, argument in enumerate(arguments):
        match = re.match(r"--?config(?P<path>(?:\.\w+)*)(?:=(?P<value>.*))?$", argument, re.DOTALL)
        if match and not match["path"]:
            following = "".join(arguments[position + 1:position + 2])
            config = load_config(following if match["value"] is None else match["value"])
        elif match and config is not None:
            _check_path(config, match["path"].split(".")[1:])


def load_config(value: str) -> ConfigDict:
    """The config of `FILE.py` or `FILE.py:variant`.

    Raises:
      UserError: there is no such file, it has no `get_config`, or it refuses the variant.
    """
    path, _, variant = value.partition(":")
    if not Path(path).is_file():
        raise UserError(f"--config {path}: there is no such file")
    spec = importlib.util.spec_from_file_location("checked_config", path)
    if spec is None:
        raise UserError(f"--config {path} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise UserError(f"--config {path} has no function get_config")
    return module.get_config(variant) if variant else module.get_config()


def _check_path(config: ConfigDict, path: Sequence[str]) -> None:
    section, where = config, "config"
    for key in path:
        if not isinstance(section, ConfigDict):
            raise UserError(f"{where} is {section!r}, not a section: {where}.{key} cannot be set")
        if key not in section:
            raise UserError(unknown_key(f"{where}.{key}", section))
        section, where = section.get(key), f"{where}.{key}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
