"""Writes tensors as `.safetensors`, one at a time."""

import json
from collections.abc import Iterable, Mapping
from typing import IO

import numpy as np

from tools.convert_torch_weights.readers import LazyTensor
from tools.convert_torch_weights.readers.tensors import SAFETENSORS_DTYPES

_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_ALIGNMENT = 8


def write_safetensors(file: IO[bytes], tensors: Iterable[LazyTensor],
                      metadata: Mapping[str, str]) -> None:
    """Writes tensors to an open binary file in the order given; each is read in its turn."""
    tensors = list(tensors)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape),
                               "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        file.write(tensor.read().reshape(-1).view(np.uint8).data)
