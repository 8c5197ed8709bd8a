"""One of two processes, of which one waits in vain for the other: see `test_multihost.py`."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import time

from pid_jax.parallel import multihost
from pid_jax.parallel.patience import patience
from pid_jax.training.interruption import catch_signals


def main() -> None:
    """The second process waits at a barrier; the first does not come and has little patience."""
    multihost.start()
    multihost.barrier("both are here")
    with patience(3.0 if multihost.is_writer() else 3600.0) as waiting, catch_signals():
        print("waiting", flush=True)
        waiting.note("step 7")
        if multihost.is_writer():
            time.sleep(600)
        multihost.barrier("the second is here alone")


if __name__ == "__main__":
    main()
