"""How the argparse commands start and end: errors as one sentence, exit status 2."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from pid_jax.errors import RunFailed, UserError, out_of_memory


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are `UserError`s, and which takes no abbreviations."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def run(main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """Calls `main(arguments)` and returns the exit status.

    0: done; 2 after `error: ...` on stderr for bad input; what a `RunFailed` carries;
    1: memory ran out.
    """
    try:
        main(arguments)
    except UserError as error:
        return _fail(str(error))
    except RunFailed as error:
        _fail(str(error))
        return error.exit_code
    except OSError as error:
        return _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "))
    except KeyboardInterrupt:
        _fail("interrupted")
        return 130
    except (MemoryError, RuntimeError) as error:
        if not (sentence := out_of_memory(error)):
            raise
        _fail(sentence)
        return 1
    return 0


def positive(text: str) -> float:
    """An argparse type: a number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def count(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def show(line: str) -> None:
    """Prints a line, escaping what the terminal's encoding cannot show."""
    encoding = sys.stdout.encoding or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def warn(sentence: str) -> None:
    """Prints `warning: ...` on stderr."""
    print(f"warning: {sentence}".encode("utf-8", "backslashreplace").decode(), file=sys.stderr)


def _fail(sentence: str) -> int:
    print(f"error: {sentence}".encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
    return 2
