"""Trains: `python -m pid_jax.main --config=configs/quickstart_pid.py --workdir=runs/first`.

Any key of the config can be set on the command line: `--config.optim.lr=1e-4`. Running the same
command again goes on from the newest checkpoint. Exit status: 0 done, 1 the run failed (loss not
finite, a file not written, memory exhausted), 2 bad input, 75 another process of the run was lost,
143 stopped by SIGTERM or SIGINT after saving. After 75 and 143 the same command goes on.
SIGUSR1 prints the stacks of all threads.

Kept short, so that everything else can be imported and tested.
"""

import faulthandler
import signal
import sys

from absl import flags

from pid_jax import command_line, config_flag
from pid_jax.config_flag import CONFIG
from pid_jax.errors import UserError

flags.adopt_module_key_flags(config_flag)
WORKDIR = flags.DEFINE_string("workdir", None, "folder of checkpoints, metrics and samples")


def main() -> None:
    """Runs the training that the flags describe."""
    if CONFIG.value is None:
        raise UserError("--config is missing: name a file such as --config=configs/"
                        "quickstart_pid.py")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    from pid_jax import host_memory, train  # after the flags: a typing mistake is answered at once
    from pid_jax.parallel import multihost

    host_memory.keep_freed_memory()
    multihost.start()
    with multihost.leaving_alone():
        train.run(CONFIG.value, WORKDIR.value)


if __name__ == "__main__":
    sys.exit(command_line.run(main, sys.argv))
