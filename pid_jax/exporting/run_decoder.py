"""Draws with an exported decoder, without pid_jax: run_decoder.py FOLDER INPUTS.npz PICTURES.npy"""
import json
import pathlib
import sys

import numpy as np
from jax import export

folder, inputs, out = map(pathlib.Path, sys.argv[1:])
decoder = export.deserialize(bytearray((folder / "decoder.stablehlo").read_bytes()))
(shapes, _), _ = decoder.in_tree.unflatten(decoder.in_avals)
data = np.memmap(folder / "weights.safetensors", mode="r")
start = 8 + int(data[:8].view("<u8")[0])
places = json.loads(data[8:start].tobytes())
weights = {name: data[slice(*places[name]["data_offsets"])].view(x.dtype).reshape(x.shape)
           for data in [data[start:]] for name, x in shapes.items()}
np.save(out, decoder.call(weights, dict(np.load(inputs))))
