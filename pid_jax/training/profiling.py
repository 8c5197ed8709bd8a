"""A profile of a few steps, on request, for TensorBoard's profile tab or Perfetto."""

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

logger = logging.getLogger(__name__)

FOLDER = "profile"


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

    def before(self, step: int, state: Any) -> None:
        """Starts or stops the recording when it is time, before the update `step`."""
        if step == self._first:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self._folder))
            self._running = True
        elif step == self._last + 1 and self._running:
            jax.block_until_ready(state)
            self._stop()

    def __exit__(self, *error: Any) -> None:
        if self._running:
            self._stop()

    def _stop(self) -> None:
        self._running = False
        jax.profiler.stop_trace()
        logger.info("profile of steps %d to %d in %s", self._first, self._last, self._folder)
