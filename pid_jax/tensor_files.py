"""Files of named tensors, read without PyTorch."""

import zipfile
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from pid_jax.errors import UserError


def read_tensors(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of a `.safetensors` or `.npz` file; UserError when it cannot be read."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no weight file at {path}")
    try:
        if path.suffix == ".npz":
            return read_npz(path)
        return load_file(path)
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(f"{path} is no readable .safetensors or .npz file: {error}; make one from "
                        "a PyTorch file with `python -m tools.convert_torch_weights tensors`"
                        ) from error


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a `.npz` file. Raises OSError or ValueError for whatever is wrong with it."""
    if path.is_file() and not zipfile.is_zipfile(path):
        raise ValueError("it is no zip file")  # where numpy would advise to unpickle it
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (zipfile.BadZipFile, AttributeError, EOFError) as error:
        raise ValueError(str(error)) from error
