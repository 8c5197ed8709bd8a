"""Files of the ditok cases: TiTok in three wrappings converts, and the key lists are complete."""

import gzip
import json
import re
import tempfile
from pathlib import Path

import numpy as np

from pid_jax.tokenizer import load_tokenizer
from tests.golden import ditok_support as support
from tests.golden.cases import Case, handles
from tests.golden.layout import to_nhwc
from tools.convert_torch_weights.convert import Request, convert
from tools.convert_torch_weights.mappings import NETWORKS, table_for
from tools.convert_torch_weights.recognise import recognise
from tools.convert_torch_weights.verify import verify


@handles("ditok", r"titok_full.*")
def check_files(case: Case) -> None:
    options = support.titok_options(case.meta["config"])
    changes = {name: json.dumps(options[name]) for name in ("vit_enc_dims", "vit_dec_dims",
                                                            "use_l2_norm", "is_legacy")}
    image = 2 * to_nhwc(case.inputs["image"]) - 1
    named = re.findall(r"\w+\.(?:safetensors|bin|pth)", case.meta["params_in"])
    held = [name for name in named if (case.folder / name).exists()]  # a subset holds some of them
    assert held, f"none of {named} is there"
    for name in held:
        with tempfile.TemporaryDirectory() as work:
            source, dst = str(case.folder / name), Path(work) / "converted"
            convert(Request(source, dst, model="titok", changes=changes))
            verify(source, dst)
            tokenizer = load_tokenizer(dst)
            np.testing.assert_array_equal(tokenizer.encode(image)[:, None],
                                          case.outputs["indices"])


@handles("ditok", r"titok_encoder_legacy|jit_tables")
def check_key_lists(case: Case) -> None:
    """Names and shapes of every released network whose list lies in the folder."""
    model = case.name.split("_")[0]
    for file in sorted(case.folder.glob(f"{model}_*_keys.json.gz")):
        with gzip.open(file) as opened:
            shapes = {key: tuple(entry[0]) for key, entry in json.load(opened).items()}
        found = recognise(shapes)
        network = NETWORKS[found.model]
        table = table_for(model, {**found.options, **network.released(found, shapes)})
        constants = {key: make().shape for key, make in table.constants.items()}
        assert table.shapes() | constants == shapes, file.name

