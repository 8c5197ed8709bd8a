"""The decoder as an ONNX file, converted by jax2onnx and run by onnxruntime.

The weights are initialisers of the graph, as runtimes expect; large ones lie in `<file>.data`.
jax2onnx cannot nest loops, so blocks are written out one after another; the solver's steps stay a
loop.
"""

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from pid_jax.errors import UserError
from pid_jax.exporting.loop_free import LoopFree
from pid_jax.exporting.program import DecoderProgram

OPSET = 21
NOISY = ("jax2onnx", "onnx_ir")


def write_onnx(path: Path, program: DecoderProgram) -> list[str]:
    """Writes the program for any batch size; gives the names of the files, `path`'s last.

    Raises:
      UserError: the packages for it are not installed.
    """
    to_onnx = _converter()
    batch, = jax.export.symbolic_shape("batch")
    inputs = program.input_shapes(batch)
    traced = jax.make_jaxpr(program.call)(
        {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
         for name, leaf in program.weights.items()}, inputs)
    weights = [np.asarray(leaf) for leaf in jax.tree.leaves(dict(program.weights))]
    names = sorted(inputs)

    def pictures(*arrays: jax.Array) -> jax.Array:
        return LoopFree()(traced, [*weights, *arrays])[0]

    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".onnx-") as work:
        to_onnx(pictures, [inputs[name] for name in names], input_names=names,
                output_names=["pictures"], opset=OPSET, model_name="pid_jax_decoder",
                return_mode="file", output_path=str(Path(work) / path.name))
        return _moved(Path(work), path)


def _moved(work: Path, path: Path) -> list[str]:
    """Moves what was written to its place, the graph last: without it the rest is not read."""
    names = sorted((file.name for file in work.iterdir()), key=lambda name: name == path.name)
    for name in names:
        os.chmod(work / name, (work / path.name).stat().st_mode)  # onnx makes private files
        with open(work / name, "rb") as file:
            os.fsync(file.fileno())
        os.replace(work / name, path.parent / name)
    return names


def _converter():
    for name in NOISY:  # they tell of plugins of other packages that do not load
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from jax2onnx import to_onnx
    except ModuleNotFoundError as error:
        raise UserError(f"exporting to ONNX needs the package {error.name}; install it with "
                        "pip install 'pid_jax[export]'") from error
    return to_onnx


def run_onnx(path: Path, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """The pictures that onnxruntime draws on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    return session.run(["pictures"], dict(inputs))[0]
