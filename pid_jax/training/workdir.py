"""The folder of a run: made, checked to be writable, described, logged into."""

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

from absl import logging as absl_logging
from ml_collections import ConfigDict

from pid_jax import config as config_lib
from pid_jax.errors import UserError
from pid_jax.files import atomic_write
from pid_jax.parallel import multihost

LOG_FORMAT = "%(asctime)s %(levelname).1s %(message)s"


def open_workdir(path: str | None) -> Path:
    """The absolute path of a writable folder, made when missing.

    Raises:
      UserError: no path given, something else stands there, or it cannot be written to.
    """
    if not path:
        raise UserError("--workdir is missing: name a folder for checkpoints and logs, such as "
                        "--workdir=runs/first")
    folder = Path(path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"--workdir {path} cannot be written to ({error.strerror}); choose a "
                        "folder that you may write to") from error
    return folder


def write_config(workdir: Path, config: ConfigDict) -> None:
    """Writes the resolved config to `config.json`."""
    with atomic_write(workdir / "config.json") as file:
        file.write(config_lib.to_json(config) + "\n")


@contextlib.contextmanager
def logging_to(workdir: Path) -> Iterator[None]:
    """Sends the package's log to stderr and to `log.txt`; libraries speak from warnings up.

    Of several processes only the writing one logs more than warnings, and only it to the file.
    """
    absl_logging.set_verbosity(absl_logging.WARNING)
    root = logging.getLogger("pid_jax")
    root.setLevel(logging.INFO if multihost.is_writer() else logging.WARNING)
    root.propagate = False
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if multihost.is_writer():
        handlers.append(logging.FileHandler(workdir / "log.txt"))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(LOG_FORMAT, datefmt="%H:%M:%S"))
        root.addHandler(handler)
    try:
        yield
    finally:
        root.propagate = True
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
