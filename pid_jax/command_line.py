"""What the commands share: exit codes, errors on stderr, and sentences for mistyped flags."""

import re
import sys
import traceback
from collections.abc import Callable, Sequence

from absl import flags
from ml_collections import config_flags

from pid_jax.config import unknown_key
from pid_jax.errors import RunFailed, UserError


def run(main: Callable[[], None], argv: Sequence[str]) -> int:
    """Parses absl flags, calls `main` and returns the exit code.

    0: the job is done. 2: bad input (`UserError`, or a flag that is wrong). `RunFailed` carries
    its own code. Anything else is a fault of this program: its traceback is printed, code 1.
    """
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
    try:
        rest = flags.FLAGS(list(argv))
    except flags.Error as error:
        raise UserError(_one_line(error)) from error
    except (AttributeError, KeyError) as error:
        raise UserError(explain_override(argv) or _one_line(error)) from error
    except (OSError, ImportError, SyntaxError, TypeError, ValueError) as error:
        raise UserError(f"the config cannot be loaded: {_one_line(error)}") from error
    if rest[1:]:
        raise UserError(f"{rest[1]!r} is not a flag; options start with --")


def explain_override(argv: Sequence[str]) -> str | None:
    """The sentence for the first `--config.a.b=v` whose path the config does not have."""
    config = _config_without_overrides(argv)
    for argument in argv:
        if match := re.match(r"--?(config(?:\.\w+)+)", argument):
            section, path = config, match[1].split(".")
            for depth, part in enumerate(path[1:], start=2):
                if part not in section:
                    return unknown_key(".".join(path[:depth]), section)
                section = section[part] if depth < len(path) else section
    return None


def _config_without_overrides(argv: Sequence[str]):
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values)
    values([argv[0], *(a for a in argv if re.match(r"--?config=", a))])
    return values["config"].value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
