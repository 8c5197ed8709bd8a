"""The exceptions that commands turn into one sentence and an exit code."""

import os
import sys


class UserError(ValueError):
    """Bad input. The message says what was wrong, the value, what was expected, what to do.

    Commands print it as `error: <message>` on stderr and exit with `exit_code` (2).
    """

    exit_code = 2


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are not what was written; a run goes back to the one before."""


class RunFailed(RuntimeError):
    """A run that started and cannot go on: a loss that is not finite, a save that failed.

    Commands print it as `error: <message>` on stderr and exit with `exit_code` (1).
    """

    exit_code = 1


class RunInterrupted(RunFailed):
    """SIGTERM or SIGINT: the state was saved first. Exit status 143, as a shell reports SIGTERM."""

    exit_code = 143


class TryAgain(RunFailed):
    """Another process died or does not come, or a save took too long: the same command goes on.

    Exit status 75 ("try again"), which launchers answer by starting all processes again.
    """

    exit_code = 75


def one_line(error: BaseException, most: int | None = None) -> str:
    """The message of an exception without its line breaks, at most so many characters of it."""
    return " ".join(str(error).split())[:most]


def out_of_memory(error: BaseException) -> str | None:
    """The sentence for an exception that says that memory, of host or device, ran out."""
    if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
        return None
    reason = one_line(error, 200) or "the host has none left"
    return (f"there is not enough memory ({reason}); use a smaller picture, a smaller batch, or "
            "for training config.optim.accumulate and config.model.remat=full")


def end_process(sentence: str, code: int) -> None:
    """Prints `error: <sentence>` and ends the process at once, from any thread."""
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    os._exit(code)
