"""Golden cases of Gemma-2 and of the whole way from captions to embeddings."""

import re

import jax
import numpy as np

from pid_jax.encoders.caption_tokenizer import FILES, load_tokenizer
from pid_jax.encoders.gemma2 import Gemma2
from pid_jax.encoders.gemma_text import GemmaTextEncoder, Layout
from tests.golden.cases import Case, assert_close, handles
from tools.convert_torch_weights.encoder_sizes import full_layers
from tools.convert_torch_weights.mappings import torch_to_jax
from tools.convert_torch_weights.mappings.encoders import encoder_table

OPTIONS = tuple(name for name in Gemma2.__dataclass_fields__ if name != "name")


def network(case: Case, variant: str) -> tuple[Gemma2, dict]:
    """The network of a variant ("eager" with the soft-cap, "sdpa" without) and its parameters."""
    config = case.meta["config"]
    options = {name: config[name] for name in OPTIONS if name in config}
    cap = config["attn_logit_softcapping"] or 0.0 if variant == "eager" else 0.0
    net = Gemma2(**options, full_attention=full_layers(config["layer_types"]), attn_softcap=cap)
    return net, torch_to_jax(encoder_table(net, "gemma2"), case.under("param/"))


@handles("encoders", r"gemma2.*")
def check_gemma(case: Case) -> None:
    ids, mask = case.inputs["input_ids"], case.inputs["attention_mask"]
    defined = case.inputs["row_defined"].astype(bool)
    states = {}
    for name, expected in case.outputs.items():
        kind, variant = name.rsplit("_", 1)
        if variant not in states:
            net, params = network(case, variant)
            states[variant] = jax.jit(lambda p, i, m, net=net: net.apply(
                {"params": p}, i, m, method="hidden_states"))(params, ids, mask)
        layer = re.fullmatch(r"hidden_(\d+)", kind)
        found = np.asarray(states[variant][int(layer[1]) if layer else -1])
        assert_close(found[defined], expected[defined], case.tolerance["atol"],
                     case.tolerance["rtol"], name)


@handles("encoders", r"encode_text.*")
def check_captions(case: Case) -> None:
    meta = case.meta
    instruction = "\n".join(meta["chi_prompt"])
    for file in FILES:
        layout = Layout(load_tokenizer(case.folder / "toy_tokenizer" / file), instruction,
                        meta["model_max_length"])
        if meta["chi_prompt"]:
            assert len(layout.tokenizer.encode(instruction)) == meta["num_chi_tokens"]
        assert layout.total == meta["max_length_all"]
        ids, mask = layout.ids(meta["captions"])
        _equal(case, input_ids=ids, attention_mask=mask, select_index=layout.kept,
               selected_ids=ids[:, layout.kept], emb_mask=mask[:, layout.kept])
    for name in case.outputs:
        if match := re.fullmatch(r"caption_embs_(\w+)", name):
            _check_embeddings(case, match[1], layout)


def _equal(case: Case, **found) -> None:
    for name, value in found.items():
        np.testing.assert_array_equal(value, case.outputs[name], err_msg=name)


def _check_embeddings(case: Case, variant: str, layout: Layout) -> None:
    net, params = network(case, variant)
    encoder = GemmaTextEncoder(net, lambda: params, lambda: layout, layout.length,
                               batch=len(case.meta["captions"]))
    assert_close(encoder.embed(case.meta["captions"]), case.outputs[f"caption_embs_{variant}"],
                 case.tolerance["atol"], case.tolerance["rtol"], variant)
