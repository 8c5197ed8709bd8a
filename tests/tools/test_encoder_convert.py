import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from pid_jax.encoders import build_codec
from pid_jax.encoders.autoencoder_codec import TINY, network_of
from pid_jax.encoders.weights import random_params, shapes_of
from pid_jax.errors import UserError
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
    for found, expected in zip(jax.tree.leaves(codec.params), jax.tree.leaves(params), strict=True):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.asarray(expected, dtype))


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
    (out / "weights.safetensors").unlink()
    with pytest.raises(UserError, match="weights.safetensors is missing"):
        build_codec("flux", weights=str(out)).params
    save_file({"encoder.mid.block_1.conv1.weight": np.zeros((2, 2, 3, 3), np.float32)}, source)
    assert cli.main([*arguments, "--overwrite"]) == 2
    assert "unknown family" in capsys.readouterr().err
