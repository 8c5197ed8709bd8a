"""Golden case G: checkpoints of every layout convert and draw; hostile ones are refused.

What a file holds is read from the case's words: `net_weights` names the weight set of each part
("A", "bf16(B)", "A=net,B=net_ema", "A/B, fake_score = 0.5*A"); without it the file is a bad one.
"""

import contextlib
import functools
import json
import re
import tempfile
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from pid_jax.config import base_config, to_json
from pid_jax.errors import UserError
from pid_jax.models import build_model
from pid_jax.training.checkpoint import load_for_inference
from tests.golden.cases import Case, assert_close, handles
from tests.golden.pid_networks import MODEL_OF_NET, nchw, nhwc
from tools.convert_torch_weights.convert import Request, convert
from tools.convert_torch_weights.mappings import jax_to_torch, table_for
from tools.convert_torch_weights.matching import LQ, Exceptions
from tools.convert_torch_weights.verify import verify

PART_NAMES = {"net_ema": "ema"}


@handles("pid", r"G\d+.*")
def check_checkpoints(case: Case) -> None:
    folder = case.folder / case.meta["folder"]
    for name, about in case.meta["files"].items():
        if not (folder / name).exists():
            continue
        with tempfile.TemporaryDirectory() as work, contextlib.chdir(work):
            if about.get("net_weights"):
                _check_good(case, folder / name, about["net_weights"], Path(work))
            else:
                _check_bad(case, folder / name, about, Path(work))


def weight_sets(words: str) -> dict[str | None, str]:
    """Part of the file (None: its only network) -> weight set that it holds."""
    if match := re.fullmatch(r"(\w+)/(\w+)(?:, (\w+) = (\S+))?", words):
        net, ema, other, scaled = match.groups()
        return {"net": net, "ema": ema} | ({other: scaled} if other else {})
    if "=" in words:
        pairs = (item.strip().split("=") for item in words.split(","))
        return {PART_NAMES.get(part, part): name for name, part in pairs}
    return {None: words}


def _check_good(case: Case, path: Path, words: str, work: Path) -> None:
    for part, words_of_set in weight_sets(words).items():
        dst = work / f"converted_{part}"
        without_lq = "without lq" in words_of_set
        convert(Request(str(path), dst, config=_config_file(case, work), which=part,
                        dtype="float32",
                        allowed=Exceptions(fresh=LQ) if without_lq else Exceptions()))
        assert verify(str(path), dst, part) > 0
        _check_weights(case, dst, words_of_set, f"{path.name} {part}")
    if set(weight_sets(words)) >= {"net", "ema"}:
        card = convert(Request(str(path), work / "default", config=_config_file(case, work)))
        assert card["weights"] == "ema", f"{path.name}: the average is not preferred"


def _config_file(case: Case, work: Path) -> str:
    config = base_config()
    config.model = ConfigDict({"name": MODEL_OF_NET[case.meta["net"]], **case.meta["config"]})
    file = work / "config.json"
    file.write_text(to_json(config))
    return str(file)


def _check_weights(case: Case, dst: Path, words: str, name: str) -> None:
    """The parameters are those of the weight set, and the network draws what the case says."""
    factor, in_bf16, set_name = re.fullmatch(
        r"(?:([\d.]+)\*)?(bf16\()?(\w+)\)?.*", words).groups()
    _, params = load_for_inference(dst)
    expected = {key: value * np.float32(factor or 1)
                for key, value in case.params(f"params_{set_name}").items()}
    if in_bf16:
        expected = {k: v.astype(jax.numpy.bfloat16).astype(np.float32) for k, v in expected.items()}
    found = jax_to_torch(_table(json.dumps(case.meta["config"]), case.meta["net"]),
                         jax.device_get(params))
    kept = [key for key in expected if not ("without lq" in words and key.startswith(LQ))]
    for key in kept:
        np.testing.assert_array_equal(found[key], expected[key], err_msg=f"{name}: {key}")
    output = f"x_with_{'bf16_' if in_bf16 else ''}{set_name}"
    if len(kept) == len(expected) and not factor and output in case.outputs:
        _check_forward(case, params, output, name)


@functools.cache
def _table(options: str, net: str):
    return table_for(MODEL_OF_NET[net], json.loads(options))


@functools.cache
def _forward(options: str, net: str):
    network = build_model(MODEL_OF_NET[net], **json.loads(options))
    return jax.jit(lambda params, inputs: network.apply({"params": params}, **inputs).x)


def _check_forward(case: Case, params, output: str, name: str) -> None:
    inputs = {key: nhwc(value) if value.ndim == 4 else value for key, value in case.inputs.items()}
    x = _forward(json.dumps(case.meta["config"]), case.meta["net"])(params, inputs)
    assert_close(nchw(x), case.outputs[output], **case.tolerance, name=f"{name}: {output}")


def _check_bad(case: Case, path: Path, about: dict, work: Path) -> None:
    request = Request(str(path), work / "converted", config=_config_file(case, work))
    try:
        convert(request)
    except UserError as error:
        message = str(error)
    else:
        raise AssertionError(f"{path.name} was converted, expected: {about['expect']}")
    key = re.search(r"[\w.]+\.(?:weight|bias)\b", about["description"])
    assert path.name in message and "\n" not in message, f"{path.name}: {message}"
    assert key is None or key[0] in message, f"{path.name}: {message}"
    left = sorted(item.name for item in work.iterdir())
    assert left == ["config.json"], f"{path.name} left {left} behind"
