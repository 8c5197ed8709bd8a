"""A profile of a few steps, on request, for TensorBoard's profile tab or Perfetto.

The steps are those of `config.log.profile`, or the next three after `workdir/profile.now` appears.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

logger = logging.getLogger(__name__)

FOLDER = "profile"
TRIGGER = "profile.now"
TRIGGERED_STEPS = 3
LOOK_EVERY = 5.0  # seconds


class Profiler(contextlib.AbstractContextManager):
    """Records steps `first` to `last`; leaving the context ends a recording that still runs."""

    def __init__(self, workdir: Path, steps: Sequence[int]):
        """Nothing is recorded yet.

        Args:
          steps: (first, last), or empty for no profile.
        """
        self._folder = Path(workdir) / FOLDER
        self._first, self._last = steps or (0, -1)
        self._running = False
        self._trigger = Path(workdir) / TRIGGER
        self._looked = -LOOK_EVERY

    def before(self, step: int, state: Any) -> None:
        """Starts or stops the recording when it is time, before the update `step`."""
        if not self._running and step > self._last and self._triggered():
            self._first, self._last = step, step + TRIGGERED_STEPS - 1
        if step == self._first:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self._folder))
            self._running = True
        elif step == self._last + 1 and self._running:
            jax.block_until_ready(state)
            self._stop()

    def _triggered(self) -> bool:
        """Whether somebody made the trigger file, looked at now and then; it stays until the end
        of the recording, so that every process sees it."""
        if time.monotonic() - self._looked < LOOK_EVERY:
            return False
        self._looked = time.monotonic()
        return self._trigger.exists()

    def __exit__(self, *error: Any) -> None:
        if self._running:
            self._stop()

    def _stop(self) -> None:
        self._running = False
        jax.profiler.stop_trace()
        self._trigger.unlink(missing_ok=True)
        logger.info("profile of steps %d to %d in %s", self._first, self._last, self._folder)
