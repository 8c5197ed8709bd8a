"""The command line of what is computed once ahead of training: captions and latents."""

from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from pid_jax import config_flag
from pid_jax.config import check_config
from pid_jax.config_flag import CONFIG
from pid_jax.errors import UserError

flags.adopt_module_key_flags(config_flag)
DST = flags.DEFINE_string("dst", None, "folder of the results")
PROCESS = flags.DEFINE_integer("process", 0, "number of this process")
PROCESSES = flags.DEFINE_integer("processes", 1, "processes that share the work")
ROWS = flags.DEFINE_integer("rows", 512, "results of a file")


def parse() -> tuple[ConfigDict, Path, int, int, int]:
    """The checked config, the folder, process, processes and rows. Raises UserError."""
    if CONFIG.value is None or DST.value is None:
        raise UserError("--config or --dst is missing: name the run's config file and a folder")
    if not 0 <= PROCESS.value < PROCESSES.value or ROWS.value < 1:
        raise UserError(f"--process={PROCESS.value} of --processes={PROCESSES.value} with "
                        f"--rows={ROWS.value}: expected 0 <= process < processes, and rows >= 1")
    check_config(CONFIG.value)
    return CONFIG.value, Path(DST.value), PROCESS.value, PROCESSES.value, ROWS.value
