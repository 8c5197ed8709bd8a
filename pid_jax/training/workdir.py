"""The folder of a run: made, checked to be writable, described, logged into."""

import contextlib
import fcntl
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

logger = logging.getLogger(__name__)

LOCK = ".lock"
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


@contextlib.contextmanager
def only_run(workdir: Path) -> Iterator[None]:
    """Holds the folder for this run; the system lets go of it however the process ends.

    Of several processes of one run the writing one holds it.

    Raises:
      UserError: another run is at work in it.
    """
    if not multihost.is_writer():
        yield
        return
    with (workdir / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another run is at work in --workdir {workdir}; wait for its end, or "
                            "choose another folder") from error
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked against a second run: %s", workdir, error.strerror)
        yield


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
