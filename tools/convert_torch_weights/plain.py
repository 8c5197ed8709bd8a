"""A PyTorch file's tensors as they are, under their own names: for networks that are only read.

Evaluation networks (FID's Inception, perceptual distances) are read from such files.
"""

from pathlib import Path

import numpy as np

from pid_jax.errors import UserError
from pid_jax.files import atomic_write
from tools.convert_torch_weights.readers import LazyTensor, open_source
from tools.convert_torch_weights.safetensors_writer import write_safetensors


def rewrite(src: str, dst: Path, overwrite: bool = False) -> int:
    """Writes the floating-point tensors of a weight file as `.safetensors`; returns their number.

    Raises:
      UserError: unreadable source, nothing in it, or a destination that exists.
    """
    if dst.suffix != ".safetensors":
        raise UserError(f"--dst {dst} ends in {dst.suffix!r}; expected .safetensors")
    if dst.exists() and not overwrite:
        raise UserError(f"{dst} exists; choose another --dst, or add --overwrite to replace it")
    tensors = [tensor for tensor in open_source(src).tensors.values() if _is_real(tensor)]
    if not tensors:
        raise UserError(f"{src} holds no floating-point tensors")
    with atomic_write(dst, "wb") as file:
        write_safetensors(file, tensors, {"format": "pt"})
    return len(tensors)


def _is_real(tensor: LazyTensor) -> bool:
    """Step counters of batch norms, whole numbers, are left out."""
    return tensor.dtype.name == "bfloat16" or np.issubdtype(tensor.dtype, np.floating)
