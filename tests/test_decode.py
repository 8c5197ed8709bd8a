import argparse
import json
import re

import numpy as np
import pytest
from PIL import Image

from pid_jax import decode, drawing_command, images
from pid_jax.data import command
from pid_jax.data.dataset import DatasetWriter
from pid_jax.data.records import Record
from pid_jax.decode_requests import pad, safe_path
from pid_jax.encoders.weights import MissingWeights
from pid_jax.inference import PixelDecoder
from tests.drawing import write_photo

# One latent of 2 x 2 cells everywhere, so that all tests share one sampler: 32 x 32 pixels.
SIZE, SMALL = 32, 16


@pytest.fixture
def run(decoder, pid_checkpoint, tmp_path, monkeypatch):
    """Runs the command on the shared decoder; gives its exit status. Output: tmp_path / "out"."""
    monkeypatch.setattr(PixelDecoder, "from_checkpoint", lambda *_, **__: decoder)
    return lambda *arguments: command.run(decode.main, [
        "--checkpoint", str(pid_checkpoint), "--out", str(tmp_path / "out"),
        *map(str, arguments)])


def read_json(path):
    return json.loads(path.read_text())


def test_ground_truth_writes_pictures_notes_sheet_and_scores(run, tmp_path, capsys):
    photo = write_photo(tmp_path / "in" / "cat.png", 40, 50)
    assert run("--input", tmp_path / "in" / "cat.png", "--ground_truth", "--size", "32x32",
               "--degrade_sigmas", "0,0.3", "--prompt", "a cat", "--seed", 7, "--untrained",
               "--codec") == 0
    out = tmp_path / "out"
    note = read_json(out / "cat" / "sigma_0.300.json")
    assert [note[k] for k in ("sigma", "seed", "prompt", "size")] == [0.3, 7, "a cat", [32, 32]]
    assert note["latent_shape"] == [2, 2, 16] and note["latent_family"] == "dct"
    assert note["step"] == 3 and note["weights"] == "ema" and note["steps"] == 2
    assert note["config"]["objective"] == "pid_teacher" and note["checkpoint"].endswith("/3")
    assert np.asarray(Image.open(out / "cat" / "sigma_0.000.png")).shape == (32, 32, 3)
    assert read_json(out / "grid.json")["columns"] == [
        "codec_bicubic", "lq_bicubic", "pid", "untrained", "truth"]
    sheet = np.asarray(Image.open(out / "grid.png"))
    np.testing.assert_array_equal(sheet[:32, -32:], photo[4:36, 9:41])
    means = read_json(out / "metrics.json")["mean_by_sigma"]
    assert set(means) == {"0.000", "0.300"}
    assert means["0.000"]["pid"].keys() == {"psnr", "ssim", "de2000"}
    assert means["0.000"]["lq_bicubic"]["psnr"] > means["0.000"]["pid"]["psnr"]
    assert "mean sigma 0.300" in capsys.readouterr().out


def test_a_small_picture_of_any_size_becomes_scale_times_larger(run, tmp_path):
    write_photo(tmp_path / "odd.png", SMALL - 3, SMALL - 2)
    assert run("--input", tmp_path / "odd.png") == 0
    drawn = Image.open(tmp_path / "out" / "odd" / "sigma_0.000.png")
    assert drawn.size == (2 * (SMALL - 2), 2 * (SMALL - 3))


def test_the_same_command_gives_the_same_bytes(run, tmp_path):
    write_photo(tmp_path / "a.png", SMALL, SMALL)
    path = tmp_path / "out" / "a" / "sigma_0.000.png"
    assert run("--input", tmp_path / "a.png") == 0
    first = path.read_bytes()
    assert run("--input", tmp_path / "a.png") == 0
    assert path.read_bytes() == first and not list(tmp_path.rglob("*.part"))


def test_unreadable_pictures_of_a_folder_are_named_and_left_out(run, tmp_path, capsys):
    folder = tmp_path / "in"
    write_photo(folder / "a.png", SMALL, SMALL)
    write_photo(folder / "sub" / "a.png", SMALL, SMALL)
    (folder / "sub" / "a.txt").write_text("a caption")
    (folder / "bad.jpg").write_bytes(b"no picture")
    assert run("--input", folder) == 0
    assert "skipped bad.jpg" in (printed := capsys.readouterr().out)
    assert "2 drawn, 1 skipped" in printed
    assert read_json(tmp_path / "out" / "sub" / "a" / "sigma_0.000.json")["prompt"] == "a caption"
    (folder / "a.png").unlink()
    (folder / "sub" / "a.png").unlink()
    assert run("--input", folder) == 2
    assert "no picture could be read: bad.jpg" in capsys.readouterr().err


def test_a_data_set_gives_pictures_and_prompts(run, tmp_path):
    write_photo(tmp_path / "a.png", SIZE, SIZE)
    with DatasetWriter(tmp_path / "set") as writer:
        writer.add(Record("../up/x", "test", SIZE, SIZE, {"prompt": "from the set"},
                          (tmp_path / "a.png").read_bytes()))
    assert run("--input", tmp_path / "set", "--ground_truth") == 0
    note = read_json(tmp_path / "out" / "up" / "x" / "sigma_0.000.json")
    assert note["prompt"] == "from the set"


def test_latents_bring_sigma_and_prompt_and_flags_go_before(run, decoder, tmp_path):
    photo = images.to_float(write_photo(tmp_path / "a.png", SMALL, SMALL))
    latent = np.asarray(decoder.objective.codec.encode(photo[None]))
    np.savez(tmp_path / "two.npz", latent=np.concatenate([latent, latent]), sigma=[0.0, 0.25],
             prompt=["one", "two"])
    assert run("--latents", tmp_path / "two.npz") == 0
    note = read_json(tmp_path / "out" / "two_001" / "sigma_0.250.json")
    assert (note["prompt"], note["sigma"]) == ("two", 0.25)
    assert run("--latents", tmp_path / "two.npz", "--degrade_sigmas", "0.5", "--prompt", "p") == 0
    assert read_json(tmp_path / "out" / "two_000" / "sigma_0.500.json")["prompt"] == "p"


def test_a_latent_file_draws_what_its_picture_draws(run, decoder, tmp_path):
    photo = images.to_float(write_photo(tmp_path / "a.png", SMALL, SMALL))
    np.save(tmp_path / "b.npy", np.moveaxis(decoder.objective.codec.encode(photo[None]), -1, 1))
    assert run("--input", tmp_path / "a.png") == 0 and run("--latents", tmp_path / "b.npy") == 0
    drawn = [np.asarray(Image.open(tmp_path / "out" / n / "sigma_0.000.png"), int) for n in "ab"]
    assert np.abs(drawn[0] - drawn[1]).max() <= 1


@pytest.mark.parametrize("arguments, words", [
    (["--input", "{}/missing.png"], "missing.png cannot be read: No such file"),
    (["--input", "{}/text.png"], "not a picture of a known format"),
    (["--input", "{}/a.png", "--size", "33x32", "--ground_truth"], "smaller than the 33 x 32"),
    (["--input", "{}/a.png", "--size", "32"], "write HEIGHTxWIDTH"),
    (["--input", "{}/a.png", "--size", "64x64", "--ground_truth"], "smaller than the 64 x 64"),
    (["--input", "{}/a.png", "--degrade_sigmas", "2"], "sigma 2.0 is no noise level"),
    (["--input", "{}/a.png", "--degrade_sigmas", "x"], "no noise levels"),
    (["--input", "{}/a.png", "--steps", "0"], "at least 1"),
    (["--latents", "{}/wrong.npy"], "'dct' latents with 16 channels"),
    (["--latents", "{}/nan.npy"], "not finite"),
    (["--latents", "{}/nan.npy", "--ground_truth"], "leave out --ground_truth"),
    ([], "one of the arguments --input --latents is required"),
])
def test_bad_input_is_one_sentence_and_writes_nothing(run, tmp_path, capsys, arguments, words):
    write_photo(tmp_path / "a.png", SIZE, SIZE)
    (tmp_path / "text.png").write_text("text")
    np.save(tmp_path / "wrong.npy", np.zeros((2, 2, 4), np.float32))
    np.save(tmp_path / "nan.npy", np.full((2, 2, 16), np.nan, np.float32))
    assert run(*(a.format(tmp_path) for a in arguments)) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ")
    assert re.search(words, errors[0])
    assert not (tmp_path / "out").exists()


def test_output_that_is_not_finite_writes_nothing(run, decoder, tmp_path, monkeypatch, capsys):
    write_photo(tmp_path / "a.png", SMALL, SMALL)
    monkeypatch.setattr(decoder, "_decode", lambda *_, **__: np.full((1, SIZE, SIZE, 3), np.nan))
    assert run("--input", tmp_path / "a.png") == 1
    assert "no picture was written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_missing_checkpoint_is_a_sentence(tmp_path, capsys):
    assert command.run(decode.main, ["--checkpoint", str(tmp_path / "none"), "--out", "x",
                                     "--input", "y.png"]) == 2
    assert "there is no checkpoint at" in capsys.readouterr().err


def test_helpers():
    assert pad(np.zeros((5, 8, 3)), 4).shape == (8, 8, 3)
    assert safe_path("../a/./b c?.png") == "a/b c_.png" and safe_path("..") == "picture"
    assert safe_path("grid.png/x") == "picture_grid.png/x"
    assert safe_path("compare.html") == "picture_compare.html"


def test_latent_files_of_one_name_do_not_replace_each_other(run, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "x.npy", np.zeros((2, 2, 16), np.float32))
    assert run("--latents", tmp_path / "a" / "x.npy", tmp_path / "b" / "x.npy") == 0
    assert read_json(tmp_path / "out" / "x" / "sigma_0.000.json")["input"].endswith("a/x.npy[0]")
    assert read_json(tmp_path / "out" / "x_2" / "sigma_0.000.json")["input"].endswith("b/x.npy[0]")


def test_noise_levels_of_one_file_name_are_refused():
    with pytest.raises(argparse.ArgumentTypeError, match="differ by less than 0.001"):
        decode.parse_sigmas("0.1,0.1001")


def test_notes_keep_text_that_is_no_utf8(tmp_path):
    drawing_command.write_json(tmp_path / "note.json", {"prompt": "caf\udce9 猫"})
    assert read_json(tmp_path / "note.json") == {"prompt": "caf\udce9 猫"}


def test_latents_need_no_weights_of_their_codec(run, decoder, tmp_path, monkeypatch):
    """Their own decoding is left out of the sheet, the picture is drawn all the same."""
    def decode(codec, latents):
        raise MissingWeights("no weights")

    codec = decoder.objective.codec
    photo = images.to_float(write_photo(tmp_path / "a.png", SMALL, SMALL))
    np.save(tmp_path / "b.npy", codec.encode(photo[None]))
    monkeypatch.setattr(type(codec), "decode", decode)
    assert run("--latents", tmp_path / "b.npy") == 0
    assert (tmp_path / "out" / "b" / "sigma_0.000.png").is_file()
