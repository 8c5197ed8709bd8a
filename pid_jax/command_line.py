"""What the commands share: exit codes, errors on stderr, and sentences for mistyped flags."""

import contextlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from pid_jax.config import unknown_key
from pid_jax.errors import RunFailed, UserError, one_line, out_of_memory


def run(main: Callable[[], None], argv: Sequence[str]) -> int:
    """Parses absl flags, calls `main` and returns the exit code; `--help` explains them.

    0: the job is done. 2: bad input (`UserError`, or a flag that is wrong). `RunFailed` carries
    its own code. 1: a file could not be read or written, or memory ran out. 130: Ctrl-C.
    Anything else is a fault of this program: its traceback is printed, code 1.
    """
    if {"-h", "-help", "--help"} & set(argv):
        print(sys.modules[main.__module__].__doc__, flags.FLAGS.main_module_help(), sep="\n")
        return 0
    try:
        parse_flags(argv)
        main()
    except (UserError, RunFailed) as error:
        return fail(str(error), error.exit_code)
    except OSError as error:
        return fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), 1)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except Exception as error:
        if sentence := out_of_memory(error):
            return fail(sentence, 1)
        traceback.print_exc()
        return 1
    return 0


def fail(sentence: str, code: int) -> int:
    """Prints `error: <sentence>` on stderr and returns `code`."""
    text = f"error: {sentence}".encode("utf-8", "backslashreplace").decode()
    print(text, file=sys.stderr, flush=True)
    return code


def parse_flags(argv: Sequence[str]) -> None:
    """Parses absl flags; a mistake becomes a `UserError` of one sentence."""
    if "config" in flags.FLAGS:
        check_config_flags(argv[1:])
    try:
        rest = flags.FLAGS(list(argv))
    except flags.Error as error:
        raise UserError(one_line(error)) from error
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
      UserError: there is no such file, it fails, or its `get_config` makes no config.
    """
    path, _, variant = value.partition(":")
    if not Path(path).is_file():
        raise UserError(f"--config {path}: there is no such file")
    spec = importlib.util.spec_from_file_location("checked_config", path)
    if spec is None:
        raise UserError(f"--config {path} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    with _faults_of(path):
        spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise UserError(f"--config {path} has no function get_config")
    with _faults_of(path):
        config = module.get_config(variant) if variant else module.get_config()
    if not isinstance(config, ConfigDict):
        raise UserError(f"get_config of --config {path} returns a {type(config).__name__}; "
                        "expected a ConfigDict, such as pid_jax.config.base_config()")
    return config


@contextlib.contextmanager
def _faults_of(path: str) -> Iterator[None]:
    """Turns whatever a config file raises into a `UserError` with the line that raised it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
                 if Path(frame.filename).name == Path(path).name]
        place = f" (line {lines[-1]})" if lines else ""
        raise UserError(f"--config {path} cannot be loaded: {type(error).__name__}: "
                        f"{one_line(error)}{place}") from error


def _check_path(config: ConfigDict, path: Sequence[str]) -> None:
    section, where = config, "config"
    for key in path:
        if not isinstance(section, ConfigDict):
            raise UserError(f"{where} is {section!r}, not a section: {where}.{key} cannot be set")
        if key not in section:
            raise UserError(unknown_key(f"{where}.{key}", section))
        section, where = section.get(key), f"{where}.{key}"
