"""The command line: what it prints, and `error: ...` with status 2 for bad input."""

import resource

import numpy as np
import pytest

from tests.tools import forge
from tests.tools.test_convert import request, state_dict
from tools.convert_torch_weights.cli import main
from tools.convert_torch_weights.readers import open_source


@pytest.fixture
def files(tmp_path):
    src = forge.save(tmp_path / "src.pth", {f"net.{k}": v for k, v in state_dict("t2i").items()})
    return src, request(tmp_path, "t2i", src).config, tmp_path


def test_convert_inspect_verify_export(files, capsys):
    src, config, folder = files
    out, back = str(folder / "out"), str(folder / "back.safetensors")
    assert main(["convert", "--src", str(src), "--config", config, "--dst", out]) == 0
    printed = capsys.readouterr().out
    assert "text-to-image PixelDiT" in printed and "NSCLv1" in printed
    assert main(["inspect", str(src)]) == 0
    printed = capsys.readouterr().out
    assert "prefix net.: " in printed and "num_groups 2: hidden_size 24" in printed
    assert "patch_blocks.*.attn.qkv_x.weight [72, 24] float32 x 3, 20,736 bytes" in printed
    assert main(["inspect", out, "--all"]) == 0
    assert "patch_blocks/attn/qkv_x/kernel [3, 3, 24, 24] float32" in capsys.readouterr().out
    assert main(["verify", str(src), out]) == 0
    assert main(["export", out, "--dst", back, "--prefix", "core."]) == 0
    assert "core.y_pos_embedding" in open_source(back).tensors


@pytest.mark.parametrize("arguments, sentence", [
    ([], "the following arguments are required"),
    (["convert", "--src", "x.pth"], "the following arguments are required: --dst"),
    (["convert", "--src", "x.pth", "--dst", "y"], "one of the arguments --model --config"),
    (["convert", "--src", "x.pth", "--dst", "y", "--model", "pixeldit"], "invalid choice"),
    (["convert", "--src", "x.pth", "--dst", "y", "--model", "pixeldit_t2i", "--set", "a"],
     "'a' is not KEY=VALUE"),
    (["inspect", "absent.pth"], "there is no file or folder absent.pth"),
    (["verify", "absent.pth", "out"], "there is no file or folder absent.pth"),
    (["export", "absent", "--dst", "x.pth"], "does not exist"),
])
def test_mistakes(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and error.count("\n") == 1


def test_a_disk_that_takes_no_more(files, capsys):
    src, config, folder = files
    before, (soft, hard) = sorted(folder.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    arguments = ["convert", "--src", str(src), "--config", config, "--dst", str(folder / "a" / "b")]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        assert main(arguments) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert sorted(folder.iterdir()) == before


def test_an_interruption(monkeypatch, capsys):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("tools.convert_torch_weights.cli.verify", stop)
    assert main(["verify", "a", "b"]) == 130
    assert capsys.readouterr().err == "error: interrupted; nothing was made\n"


def test_flags_of_the_auxiliary_head(tmp_path, capsys):
    src = forge.save(tmp_path / "whole.pth", state_dict("v1.5"))
    config = request(tmp_path, "v1.5", src).config
    assert main(["convert", "--src", str(src), "--config", config, "--drop-aux-head",
                 "--dst", str(tmp_path / "without")]) == 0
    assert "left out: lq_proj.lq_aux_rgb_head.3.weight" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "without"), "--dst", str(tmp_path / "bare.pth")]) == 0
    assert main(["convert", "--src", str(tmp_path / "bare.pth"), "--config", config,
                 "--fresh-aux-head", "--dst", str(tmp_path / "again")]) == 0
    assert "fresh: lq_proj.lq_aux_rgb_head.3.weight" in capsys.readouterr().out


def test_a_bad_config_key(files, capsys):
    src, config, folder = files
    status = main(["convert", "--src", str(src), "--config", config, "--dst", str(folder / "out"),
                   "--set", "hiden_size=3"])
    assert status == 2 and "did you mean 'hidden_size'" in capsys.readouterr().err


def test_wrong_shape_names_key_and_both_shapes(files, capsys):
    src, config, folder = files
    forge.save(src, state_dict("t2i") | {"final_layer.linear.weight": np.zeros((3, 5), np.float32)})
    main(["convert", "--src", str(src), "--config", config, "--dst", str(folder / "out")])
    error = capsys.readouterr().err
    assert "final_layer.linear.weight has shape [3, 5], expected [3, 4]" in error
