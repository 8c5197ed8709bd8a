"""SIGTERM and SIGINT as a question that the loop asks between two steps.

Python runs a signal's handler in the main thread, which does not come to it while it waits in a
collective for another process. So a thread of its own is woken by the signal itself.
"""

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator

from pid_jax.errors import RunInterrupted, end_process

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """Truthy after the first signal; a second one ends the process at once."""

    def __init__(self, grace: float = 300.0):
        """Nothing has come yet.

        Args:
          grace: seconds after the first signal in which the run must end by itself.
        """
        self.signal: signal.Signals | None = None
        self._grace = grace
        self._timer: threading.Timer | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def __str__(self) -> str:
        return self.signal.name if self.signal else "a signal to another process"

    def notice(self, number: int) -> None:
        """Remembers the first signal; ends the process at the second."""
        if self.signal:
            end_process(f"{signal.Signals(number).name} came twice; nothing more is saved, run the "
                        "same command again to go on from the newest checkpoint", 128 + number)
        self.signal = signal.Signals(number)
        self._timer = threading.Timer(self._grace, self._give_up)
        self._timer.daemon = True
        self._timer.start()
        logger.info("%s: saving after this step; a second signal ends at once", self.signal.name)

    def _give_up(self) -> None:
        end_process(f"{self} came {self._grace:g} s ago (config.checkpoint.grace) and the state is "
                    "not saved yet; run the same command again to go on from the newest "
                    "checkpoint", RunInterrupted.exit_code)

    def over(self) -> None:
        """The run ends by itself now."""
        if self._timer:
            self._timer.cancel()


@contextlib.contextmanager
def catch_signals(grace: float = 300.0) -> Iterator[Interruption]:
    """Notices signals (started in the main thread only) and puts the old handlers back."""
    interruption = Interruption(grace)
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    with _signal_bytes(interruption.notice):
        before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        try:
            yield interruption
        finally:
            interruption.over()
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _signal_bytes(notice: Callable[[int], None]) -> Iterator[None]:
    """Calls `notice` in a thread for each of `SIGNALS` that comes, also while C++ code runs."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while received := reader.recv(1):
            if received[0] in SIGNALS:
                notice(received[0])

    thread = threading.Thread(target=watch, daemon=True, name="signals")
    thread.start()
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        thread.join()
        reader.close()
