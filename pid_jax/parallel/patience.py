"""An end to waiting: a process whose collective never returns says so and stops."""

import contextlib
import faulthandler
import logging
import threading
import time
from collections.abc import Iterator

import jax

from pid_jax.errors import TryAgain, end_process

logger = logging.getLogger(__name__)


class Patience:
    """What this process is doing, and since when."""

    def __init__(self):
        """The clock starts."""
        self.note("the start")

    def note(self, doing: str) -> None:
        """Names what is done next and starts the clock again."""
        self.doing, self.since = doing, time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since the last note."""
        return time.monotonic() - self.since


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[Patience]:
    """Ends one of several processes when no note comes for `seconds`, with all its stacks.

    jax notices processes that died (their heartbeat stops). This is for those that live and do
    not come: stopped, stuck in a file system, or at another collective. A thread looks at the
    clock, since the main thread runs no Python while it waits. A single process waits for nobody:
    it prints its stacks and goes on, in case it only compiles.
    """
    state, done = Patience(), threading.Event()
    threading.Thread(target=_watch, args=(state, seconds, done), daemon=True,
                     name="patience").start()
    try:
        yield state
    finally:
        done.set()


def _watch(state: Patience, seconds: float, done: threading.Event) -> None:
    seen = None
    while not done.wait(min(1.0, seconds / 4)):
        if state.waited > seconds and state.since != seen:
            seen = state.since
            faulthandler.dump_traceback(all_threads=True)
            waited = f"at {state.doing} for {seconds:g} s (config.mesh.patience)"
            if jax.process_count() > 1:
                end_process(
                    f"process {jax.process_index()} of {jax.process_count()} has been {waited}: "
                    "another process does not come; look at the logs of all, end them, and run "
                    "the same command again", TryAgain.exit_code)
            logger.warning("this process has been %s; its stacks are above", waited)
