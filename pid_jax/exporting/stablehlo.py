"""The decoder as StableHLO, in the serialised form of `jax.export`, with its weights beside it.

The weights are no constants of the program: one file of them serves artefacts of several picture
sizes, and a serialised program must stay below 2 GiB.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pid_jax.errors import UserError
from pid_jax.exporting.program import DecoderProgram
from pid_jax.files import atomic_write

PLATFORMS = ("cpu", "cuda", "tpu")
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8",
                      "float8_e4m3fn": "F8_E4M3"}


def serialised(program: DecoderProgram) -> bytes:
    """The program for any batch size and all of `PLATFORMS`.

    Raises:
      UserError: the package flatbuffers is not installed.
    """
    try:
        import flatbuffers  # noqa: F401 - jax.export needs it and does not ask for it
    except ModuleNotFoundError as error:
        raise UserError("exporting needs the package flatbuffers; install it with "
                        "pip install 'pid_jax[export]'") from error
    batch, = jax.export.symbolic_shape("batch")
    weights = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
               for name, leaf in program.weights.items()}
    exported = jax.export.export(jax.jit(program.call), platforms=PLATFORMS)(
        weights, program.input_shapes(batch))
    return bytes(exported.serialize())


def write_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Writes arrays as `.safetensors`, one at a time from their devices."""
    header, at = {}, 0
    for name, leaf in weights.items():
        header[name] = {"dtype": SAFETENSORS_DTYPES[leaf.dtype.name], "shape": list(leaf.shape),
                        "data_offsets": [at, at + leaf.nbytes]}
        at += leaf.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for leaf in weights.values():
            file.write(np.asarray(leaf).reshape(-1).view(np.uint8).data)
