"""Golden cases of the family pixeldit that are checkpoint files: they convert and draw."""

import tempfile
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from pid_jax.config import base_config, to_json
from pid_jax.models import build_model, option_names
from pid_jax.training.checkpoint import load_for_inference
from tests.golden.cases import Case, assert_close, handles
from tests.golden.pid_networks import nchw, nhwc
from tools.convert_torch_weights.convert import Request, convert
from tools.convert_torch_weights.mappings import jax_to_torch, table_for
from tools.convert_torch_weights.verify import verify


@handles("pixeldit", r"tiny_t2i_ckpt.*")
def check_text_to_image(case: Case) -> None:
    known = option_names("pixeldit_t2i")
    options = {key: value for key, value in case.meta["config"].items() if key in known}
    config = base_config()
    config.model = ConfigDict({"name": "pixeldit_t2i", **options})
    for name in case.meta["files"]:
        with tempfile.TemporaryDirectory() as work:
            file, dst = Path(work) / "config.json", Path(work) / "converted"
            file.write_text(to_json(config))
            convert(Request(str(case.folder / name), dst, config=str(file)))
            verify(str(case.folder / name), dst)
            _check(case, options, load_for_inference(dst)[1])


def _check(case: Case, options: dict, params: dict) -> None:
    found = jax_to_torch(table_for("pixeldit_t2i", options), jax.device_get(params))
    for key, value in case.under("state/core.").items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    network = build_model("pixeldit_t2i", **options)
    inputs = case.inputs
    out = network.apply({"params": params}, nhwc(inputs["x"]), inputs["t"], inputs["y"])
    assert_close(nchw(out.x), case.outputs["v"], **case.tolerance, name="v")
