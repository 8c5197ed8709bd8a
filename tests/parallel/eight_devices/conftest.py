"""These modules need eight devices: `test_eight_devices.py` runs them in processes of their own."""

import os

if not os.environ.get("PID_JAX_EIGHT_DEVICES"):
    collect_ignore_glob = ["test_*.py"]
