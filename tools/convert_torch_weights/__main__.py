"""`python -m tools.convert_torch_weights`."""

import signal
import sys

from tools.convert_torch_weights.cli import main


def _interrupt(number, frame):
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)  # so that what is half made is removed
    sys.exit(main(sys.argv[1:]))
