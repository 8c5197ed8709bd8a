"""`python -m tools.convert_torch_weights`."""

import sys

from tools.convert_torch_weights.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
