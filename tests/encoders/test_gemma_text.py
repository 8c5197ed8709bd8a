import json
from pathlib import Path

import numpy as np
import pytest

from pid_jax import embed_captions
from pid_jax.encoders import TextEncoder, build_text_encoder, gemma_text
from pid_jax.encoders.caption_tokenizer import load_tokenizer
from pid_jax.encoders.instruction import INSTRUCTION
from pid_jax.errors import UserError
from tests import tiny

TOKENIZER = Path(__file__).parents[1] / "golden/data/encoders/toy_tokenizer"
OPTIONS = {"width": 16, "length": 4, "weights": "random", "tokenizer": str(TOKENIZER),
           "instruction": (), "dtype": "float32", "batch": 2}
CAPTIONS = ["a red door", "", "two cats", "a red door"]


@pytest.fixture(scope="module")
def encoder():
    return build_text_encoder("gemma2", **OPTIONS)


def test_embeddings_do_not_depend_on_the_batch(encoder):
    assert isinstance(encoder, TextEncoder)
    rows = encoder.embed(CAPTIONS)
    assert rows.shape == (4, 4, 16) and rows.dtype == np.float32
    np.testing.assert_array_equal(rows[0], rows[3])
    np.testing.assert_array_equal(rows[1], encoder.null)
    np.testing.assert_allclose(encoder.embed(["two cats"])[0], rows[2], atol=1e-6)
    assert np.abs(rows[0] - rows[2]).max() > 0.1


def test_the_released_instruction():
    text = "\n".join(INSTRUCTION)
    assert len(text) == 1057 and text.endswith("User Prompt: ")


def test_both_tokenizer_files_agree():
    both = [load_tokenizer(TOKENIZER / name) for name in ("tokenizer.json", "tokenizer.model")]
    for text in ("naïve café 12", "", "  spaces  ", "half of a pair: \ud83d", "\x00"):
        assert both[0].encode(text) == both[1].encode(text)
    assert both[0].encode("\udcff") == both[0].encode("?")
    assert (both[0].begin, both[0].pad) == (both[1].begin, both[1].pad) == (2, 0)


def test_missing_and_damaged_tokenizers(tmp_path):
    with pytest.raises(UserError, match="tokenizer is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_missing_weights_and_wrong_width(tmp_path):
    with pytest.raises(UserError, match="gemma-2-2b-it.*config.text.weights"):
        build_text_encoder("gemma2", weights=str(tmp_path)).load()
    card = {"format": 1, "encoder": "gemma2", "network": {"hidden_size": 64}}
    (tmp_path / "encoder.json").write_text(json.dumps(card))
    with pytest.raises(UserError, match="width is 2304, but .* Gemma-2 of width 64"):
        build_text_encoder("gemma2", weights=str(tmp_path))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.model"])
def test_a_tokenizer_of_more_tokens_than_the_network_knows(monkeypatch, file):
    monkeypatch.setitem(gemma_text.TINY, "vocab_size", 64)
    encoder = build_text_encoder("gemma2", **OPTIONS | {"tokenizer": str(TOKENIZER / file)})
    with pytest.raises(UserError, match="tokenizer has 46[02] tokens, but this Gemma-2 knows 64"):
        encoder.load()


def test_another_width_without_weights(tmp_path):
    with pytest.raises(UserError, match="width is 64, but the published .* Gemma-2 of width 2304"):
        build_text_encoder("gemma2", weights=str(tmp_path), width=64)


@pytest.mark.parametrize("option, value, sentence", [
    ("length", 0, "config.text.length is 0; expected at least 1"),
    ("batch", 0, "config.text.batch is 0; expected at least 1"),
    ("instruction", "Describe", "config.text.instruction is 'Describe'; expected a tuple of lines"),
    ("attn_softcap", -50.0, "config.text.attn_softcap is -50.0; expected a number above 0")])
def test_options_that_are_none(option, value, sentence):
    with pytest.raises(UserError, match=sentence):
        build_text_encoder("gemma2", **OPTIONS | {option: value})


def test_stored_embeddings_of_two_processes(tmp_path, encoder, monkeypatch):
    config = tiny.config("pixeldit_t2i", tiny.write_dataset(tmp_path / "data", count=5))
    config.text = {"name": "gemma2", **OPTIONS}
    monkeypatch.setattr("pid_jax.encoders.build_text_encoder", lambda name, **_: encoder)
    folder = tmp_path / "captions"
    embed_captions.embed(config, folder, 0, 2, rows=3)
    with pytest.raises(UserError, match="no complete caption embeddings"):
        build_text_encoder("gemma2", stored=str(folder))
    embed_captions.embed(config, folder, 1, 2, rows=3)
    monkeypatch.undo()
    stored = build_text_encoder("gemma2", **OPTIONS | {"stored": str(folder)})
    assert isinstance(stored, TextEncoder)
    captions = ["", *(f"ramp number {i}" for i in range(5))]
    np.testing.assert_allclose(stored.embed(captions), encoder.embed(captions), atol=0.02)
    np.testing.assert_array_equal(stored.null, stored.embed([""])[0])
    with pytest.raises(UserError, match="lack the caption 'a house'"):
        stored.embed(["a house"])
    with pytest.raises(UserError, match="4 tokens of width 16"):
        build_text_encoder("gemma2", stored=str(folder))
    for option, value in (("attn_softcap", 50.0), ("instruction", ("Describe:",))):
        with pytest.raises(UserError, match=f"were made with text.{option} .* asks for"):
            build_text_encoder("gemma2", **OPTIONS | {"stored": str(folder), option: value})
    manifest = folder / "captions-00001-of-00002.json"
    manifest.write_text(manifest.read_text().replace('"gemma2"', '"hashed"'))
    with pytest.raises(UserError, match="different sizes or by different encoders"):
        build_text_encoder("gemma2", **OPTIONS | {"stored": str(folder)})


def test_a_file_of_other_captions_is_not_kept(tmp_path, encoder):
    path = tmp_path / "captions-00000-00000.safetensors"
    embed_captions.write_file(path, encoder, ["a red door"], OPTIONS)
    before = path.stat().st_mtime_ns
    embed_captions.write_file(path, encoder, ["a red door"], OPTIONS | {"batch": 7})
    assert path.stat().st_mtime_ns == before
    with pytest.raises(UserError, match="other captions"):
        embed_captions.write_file(path, encoder, ["two cats"], OPTIONS)
    with pytest.raises(UserError, match="by another encoder"):
        embed_captions.write_file(path, encoder, ["a red door"], OPTIONS | {"attn_softcap": 50.0})
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="is damaged: .*; remove it"):
        embed_captions.write_file(path, encoder, ["a red door"], OPTIONS)
