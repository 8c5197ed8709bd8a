import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pid_jax.encoders import build_codec, build_text_encoder
from pid_jax.encoders.autoencoder_codec import TINY, network_of
from pid_jax.encoders.gemma2 import Gemma2
from pid_jax.encoders.gemma_text import TINY as GEMMA
from pid_jax.encoders.weights import random_params, shapes_of
from pid_jax.errors import UserError
from tests.golden.cases import COMMITTED
from tests.tools import forge
from tools.convert_torch_weights import cli
from tools.convert_torch_weights.mappings import jax_to_torch
from tools.convert_torch_weights.mappings.encoders import encoder_table


def write_source(path, family: str, naming: str, dtype=np.float32, **extra):
    """A file as published, with the initial values of the tiny network; returns the values."""
    network = network_of(family, **TINY)
    params = random_params(shapes_of(network))
    tensors = jax_to_torch(encoder_table(network, naming), params)
    save_file({key: np.ascontiguousarray(value, dtype) for key, value in tensors.items()} | extra,
              path)
    return params


def same_leaves(found, expected, dtype):
    """Trees with equal numbers in `dtype`."""
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_array_equal(ours, np.asarray(theirs, dtype))


@pytest.mark.parametrize("family, naming, dtype, extra", [
    ("flux", "ldm", np.float32, {"model_ema.decay": np.zeros(())}),
    ("sd3", "diffusers", np.float16, {}),
    ("flux2", "diffusers", np.float32, {"bn.num_batches_tracked": np.zeros((), np.int64)}),
    ("qwenimage", "diffusers3d", np.float32,
     {"encoder.down_blocks.2.time_conv.weight": np.zeros((2, 2, 3, 1, 1), np.float32)}),
    ("qwenimage", "wan2d", np.float32, {})])
def test_converted_files_are_found_and_equal(tmp_path, monkeypatch, family, naming, dtype, extra):
    params = write_source(tmp_path / "source.safetensors", family, naming, dtype, **extra)
    monkeypatch.setenv("PID_JAX_WEIGHTS", str(tmp_path / "weights"))
    assert cli.main(["encoder", "--name", family, "--src", str(tmp_path / "source.safetensors"),
                     "--dst", str(tmp_path / "weights" / family)]) == 0
    codec = build_codec(family)
    assert codec.network == network_of(family, **TINY)
    same_leaves(codec.params, params, dtype)


def test_another_familys_weights_are_refused(tmp_path, capsys):
    source = tmp_path / "flux2.safetensors"
    write_source(source, "flux2", "ldm")
    arguments = ["encoder", "--src", str(source), "--dst", str(tmp_path / "out")]
    assert cli.main([*arguments, "--name", "flux"]) == 2
    assert "auto-encoder of 128-channel flux2 latents" in capsys.readouterr().err
    assert cli.main([*arguments, "--name", "flux2"]) == 0
    with pytest.raises(UserError, match="asks for 16-channel flux latents, but .* holds "
                       "128-channel flux2 latents"):
        build_codec("flux", weights=str(tmp_path / "out"))
    assert cli.main([*arguments, "--name", "flux2"]) == 2
    assert "exists" in capsys.readouterr().err


def test_incomplete_and_damaged_weights(tmp_path, capsys):
    source, out = tmp_path / "ae.safetensors", tmp_path / "out"
    write_source(source, "flux", "ldm")
    arguments = ["encoder", "--name", "flux", "--src", str(source), "--dst", str(out)]
    assert cli.main(arguments) == 0
    card = json.loads((out / "encoder.json").read_text())
    card["network"]["num_res_blocks"] = 2
    (out / "encoder.json").write_text(json.dumps(card))
    with pytest.raises(UserError, match="does not hold the network"):
        build_codec("flux", weights=str(out)).params
    card["network"]["colour"] = "blue"
    (out / "encoder.json").write_text(json.dumps(card))
    with pytest.raises(UserError, match="encoder.json is not understood"):
        build_codec("flux", weights=str(out))
    del card["network"]["colour"]
    (out / "encoder.json").write_text(json.dumps(card))
    (out / "weights.safetensors").unlink()
    with pytest.raises(UserError, match="weights.safetensors is missing"):
        build_codec("flux", weights=str(out)).params
    (out / "notes.txt").write_text("mine")
    assert cli.main([*arguments, "--overwrite"]) == 2
    assert "what no conversion wrote (notes.txt)" in capsys.readouterr().err
    (out / "notes.txt").unlink()
    save_file({"encoder.mid.block_1.conv1.weight": np.zeros((2, 2, 3, 3), np.float32)}, source)
    assert cli.main([*arguments, "--overwrite"]) == 2
    assert "unknown family" in capsys.readouterr().err


@pytest.mark.parametrize("network", [
    {"ch": 0}, {"ch": -32}, {"ch": 48}, {"ch": "32"}, {"ch_mult": []}, {"ch_mult": [0, 1]},
    {"z_channels": None}, {"patch": 0}, {"parent": 3}, {"ch_mult": 2}])
def test_headers_that_describe_no_network(tmp_path, network):
    card = {"format": 1, "encoder": "flux", "network": network}
    (tmp_path / "encoder.json").write_text(json.dumps(card))
    with pytest.raises(UserError, match="encoder.json is not understood"):
        build_codec("flux", weights=str(tmp_path))


@pytest.mark.parametrize("encoder", [["flux"], {"a": 1}, None, 3])
def test_headers_of_no_encoder(tmp_path, encoder):
    card = {"format": 1, "encoder": encoder, "network": {}}
    (tmp_path / "encoder.json").write_text(json.dumps(card))
    with pytest.raises(UserError, match="asks for 16-channel flux latents, but"):
        build_codec("flux", weights=str(tmp_path))


def test_a_published_file_is_no_folder(tmp_path):
    source = tmp_path / "ae.safetensors"
    source.write_bytes(b"")
    with pytest.raises(UserError, match="ae.safetensors is a file; make a folder of it: .*convert"):
        build_codec("flux", weights=str(source)).load()


@pytest.mark.parametrize("shape, sentence", [
    ((0, 3, 3, 3), "unknown family"), ((), "unknown family"),
    ((48, 3, 3, 3), "no auto-encoder has ch 48")])
def test_sizes_of_no_auto_encoder(tmp_path, capsys, shape, sentence):
    source = tmp_path / "ae.safetensors"
    write_source(source, "flux", "ldm")
    save_file(load_file(source) | {"encoder.conv_in.weight": np.zeros(shape, np.float32)}, source)
    assert cli.main(["encoder", "--name", "flux", "--src", str(source),
                     "--dst", str(tmp_path / "out")]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_gemma_in_shards_with_its_tokenizer(tmp_path):
    network = Gemma2(hidden_size=16, full_attention=(1,), **GEMMA)
    params = random_params(shapes_of(network))
    tensors = jax_to_torch(encoder_table(network, "gemma2"), params)
    source, out = tmp_path / "gemma", tmp_path / "out"
    write_shards(source, {f"model.{key}": np.asarray(value, ml_dtypes.bfloat16)
                          for key, value in tensors.items()})
    (source / "config.json").write_text(json.dumps(
        {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4096,
         "layer_types": ["sliding_attention", "full_attention"]}))
    arguments = ["encoder", "--name", "gemma2", "--src", str(source), "--dst", str(out)]
    assert cli.main(arguments) == 2  # no tokenizer
    shutil.copyfile(COMMITTED / "encoders/toy_tokenizer/tokenizer.model",
                    source / "tokenizer.model")
    assert cli.main(arguments) == 0
    encoder = build_text_encoder("gemma2", width=16, length=4, weights=str(out), instruction=())
    assert encoder.layout.ids(["a"])[0].shape == (1, 4)
    assert encoder.network == network.clone(dtype=encoder.network.dtype)
    same_leaves(encoder.params, params, ml_dtypes.bfloat16)


@pytest.mark.parametrize("name, heads", [("dinov2", 16), ("siglip", 2)])
def test_representation_auto_encoders(tmp_path, capsys, name, heads):
    codec = build_codec(name, weights="random")
    parts = {"model": encoder_table(codec.encoder, name),
             "decoder": encoder_table(codec.decoder, "mae_decoder")}
    for part, table in parts.items():
        values = codec.params["encoder" if part == "model" else "decoder"]
        forge.save(tmp_path / f"{part}.pth", {key: np.asarray(value) for key, value in
                                              jax_to_torch(table, values).items()})
    forge.save(tmp_path / "stats.pth", {key: np.moveaxis(value, -1, 0) for key, value in
                                        codec.params.get("stats", {}).items()})
    (tmp_path / "sizes.json").write_text(json.dumps({"decoder_num_attention_heads": 2}))
    arguments = ["encoder", "--name", name, "--src", str(tmp_path / "model.pth"), "--dst",
                 str(tmp_path / "out"), "--decoder", str(tmp_path / "decoder.pth")]
    assert cli.main(arguments) == 2
    missing = "--stats is missing" if name == "dinov2" else "told by no shape"
    assert missing in capsys.readouterr().err
    more = (["--stats", str(tmp_path / "stats.pth")] if name == "dinov2" else
            ["--decoder_config", str(tmp_path / "sizes.json")])
    assert cli.main([*arguments, *more]) == 0
    found = build_codec(name, weights=str(tmp_path / "out"))
    assert found.decoder == codec.decoder.clone(num_heads=heads)
    assert found.encoder.num_layers == 1 and found.encoder.hidden_size == codec.channels
    if name == "siglip":  # the full-size grid of dinov2 is not that of its tiny statistics
        same_leaves(found.params, codec.params, np.float32)


def write_shards(folder, tensors):
    """Two files with an index, as published."""
    folder.mkdir()
    names = sorted(tensors)
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        forge.save(folder / file, {name: tensors[name] for name in names if places[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
