"""The commands: pictures to token files and back, caches, bits a pixel, whole evaluations."""

import json

import jax
import numpy as np
import pytest
from PIL import Image

from pid_jax import evaluate_tokens, objectives, tokens
from pid_jax.data import command
from pid_jax.data.token_cache import TokenCache
from pid_jax.errors import UserError
from pid_jax.training import checkpoint
from tests import tiny
from tests.drawing import random_like
from tests.objectives.test_ditok import SIDE, make_config


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run's folder with a checkpoint of random weights."""
    folder, config = tmp_path_factory.mktemp("run"), make_config()
    state = objectives.build(config).init(jax.random.key(0))
    saver = checkpoint.Checkpointer(folder, 1)
    saver.save(state, {}, config)
    saver.close()
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return tiny.write_dataset(tmp_path_factory.mktemp("ramps") / "data", count=3, size=SIDE)


def test_a_picture_goes_to_a_small_file_and_back(workdir, tmp_path, capsys):
    picture = np.random.default_rng(0).integers(0, 256, (20, 30, 3)).astype(np.uint8)
    Image.fromarray(picture).save(tmp_path / "noise.png")
    tokens.main(["encode", "--checkpoint", str(workdir), "--input", str(tmp_path / "noise.png"),
                 "--out", str(tmp_path / "tok")])
    assert (tmp_path / "tok" / "noise.tok").stat().st_size == 16 + 3  # 4 indices of 5 bits
    tokens.main(["decode", "--checkpoint", str(workdir), "--input", str(tmp_path / "tok"),
                 "--out", str(tmp_path / "drawn"), "--seed", "3"])
    assert Image.open(tmp_path / "drawn" / "noise.png").size == (SIDE, SIDE)
    assert "4 tokens, 19 bytes" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, sentence", [
    (["decode", "--label", "3"], "label 3 is no class"), (["decode"], "is no token file"),
    (["decode", "--seed", "-1"], "seed -1 is out of range"),
    (["decode", "--seed", str(2**32)], "seed 4294967296 is out of range"),
    (["decode", "--guidance", "nan"], "guidance scale is nan"),
    (["decode", "--steps", "10000000"], "1 to 10000 steps"),
    (["decode", "--which", "ema3"], "weights 'ema3' are unknown"),
    (["encode"], "x.tok cannot be read")])
def test_bad_input_is_one_sentence(workdir, tmp_path, capsys, arguments, sentence):
    (tmp_path / "x.tok").write_bytes(b"nothing")
    name, *flags = arguments
    if flags:
        indices = np.zeros(4, np.int32)
        tokenizer = tokens.load_tokenizer(workdir)
        tokens.token_files.write(tmp_path / "x.tok", indices, 32, tokenizer.fingerprint)
    status = command.run(tokens.main, [name, "--checkpoint", str(workdir), "--input",
                                       str(tmp_path / "x.tok"), "--out", str(tmp_path), *flags])
    assert status == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error


def test_a_cache_holds_the_tokens_of_every_record(workdir, dataset, tmp_path):
    path = tmp_path / "cache.npz"
    tokens.main(["cache", "--checkpoint", str(workdir), "--data", str(dataset), "--out", str(path),
                 "--batch", "2"])
    config = make_config(dataset, token_cache=str(path))
    objective = objectives.build(config)
    assert objective.cache.indices.shape == (3, 4)
    objective.check_weights(tokens.load_tokenizer(workdir).checkpoint.params)
    assert TokenCache.read(path).resize == "adm"
    whole = path.read_bytes()
    for damaged, words in ((b"text", "it is no zip file"), (whole[:300], "it is no zip file"),
                           (whole[:180] + b"!!!!" + whole[184:], "Bad CRC")):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"no token cache .*{words}"):
            TokenCache.read(path)


def test_files_of_the_training_are_not_needed_for_drawing(tmp_path):
    config = make_config(tmp_path, token_cache=str(tmp_path / "gone.npz"), perceptual="vgg16_bn",
                         perceptual_weight=1.0, perceptual_weights=str(tmp_path / "gone"))
    with pytest.raises(UserError, match="gone"):
        objectives.build(config)
    objective = objectives.build(config, drawing=True)
    state = objective.start(random_like(objective.abstract_params, 0))
    saver = checkpoint.Checkpointer(tmp_path / "run", 1)
    saver.save(state, {}, config)
    saver.close()
    tokenizer = tokens.load_tokenizer(tmp_path / "run", "ema2")
    assert tokenizer.checkpoint.config.ditok.token_cache == config.ditok.token_cache


def test_bits_per_pixel(capsys):
    tokens.main(["bpp"])
    assert "32 tokens x 12 bits / (256 x 256 pixels) = 0.005859" in capsys.readouterr().out


def test_an_evaluation_is_written_and_printed(workdir, dataset, capsys):
    evaluate_tokens.main(["--checkpoint", str(workdir), "--data", str(dataset), "--mean_of",
                          str(dataset), "--steps", "1"])
    printed = capsys.readouterr().out
    assert "psnr_mean_picture" in printed and "rfid                 unavailable" in printed
    found = json.loads((workdir / "evaluation_history" / "eval_step00000000.json").read_text())
    assert found["note"]["pictures"] == 3 and found["metrics"]["bpp"] == 4 * 5 / SIDE**2
