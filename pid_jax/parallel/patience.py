"""An end to waiting: a process whose collective never returns says so and stops."""

import contextlib
import threading
import time
from collections.abc import Iterator

import jax

from pid_jax.errors import end_process


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
    """Ends the process when no note comes for `seconds`; a single process waits for nobody.

    jax notices processes that died (their heartbeat stops). This is for those that live and do
    not come: stopped, stuck in a file system, or at another collective. A thread looks at the
    clock, since the main thread runs no Python while it waits.
    """
    state, done = Patience(), threading.Event()
    if jax.process_count() == 1:
        yield state
        return
    threading.Thread(target=_watch, args=(state, seconds, done), daemon=True).start()
    try:
        yield state
    finally:
        done.set()


def _watch(state: Patience, seconds: float, done: threading.Event) -> None:
    while not done.wait(min(1.0, seconds / 4)):
        if state.waited > seconds:
            end_process(
                f"process {jax.process_index()} of {jax.process_count()} has been at "
                f"{state.doing} for {seconds:g} s (config.mesh.patience): another process does "
                "not come; look at the logs of all, end them, and run the same command again", 1)
