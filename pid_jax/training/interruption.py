"""SIGTERM and SIGINT as a question that the loop asks between two steps."""

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """Truthy after the first signal; a second one acts at once."""

    def __init__(self):
        """Nothing has come yet."""
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def __str__(self) -> str:
        return self.signal.name if self.signal else "a signal to another process"

    def handle(self, number: int, frame) -> None:
        """Remembers the signal and gives the next one its default meaning."""
        self.signal = signal.Signals(number)
        signal.signal(number, signal.SIG_DFL)
        logger.info("%s: saving after this step", self.signal.name)


@contextlib.contextmanager
def catch_signals() -> Iterator[Interruption]:
    """Installs the handlers (in the main thread only) and puts the old ones back."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.signal(number, interruption.handle) for number in SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
