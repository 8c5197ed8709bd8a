"""Fixed evaluation batches: what the command writes, and what trainings and decode read."""

import numpy as np
import pytest

from pid_jax import fixed_batches, images
from pid_jax.data import command, latent_files
from pid_jax.encoders import build_codec
from pid_jax.errors import UserError
from pid_jax.training import fixed_inputs
from tests.drawing import write_photo


@pytest.fixture
def make(tmp_path):
    """Runs the command on one photograph; gives its exit status."""
    photo = write_photo(tmp_path / "in" / "cat.png", 40, 50)
    (tmp_path / "in" / "cat.txt").write_text("a cat")
    run = lambda *more: command.run(fixed_batches.main, [
        "--input", str(tmp_path / "in"), "--dst", str(tmp_path / "out"), "--codec", "dct",
        "--scale", "2", *more])
    run.photo = photo
    return run


def test_files_hold_latent_sigma_caption_and_pictures(make, tmp_path, capsys):
    assert make("--size", "32x32", "--sigmas", "0,0.5") == 0
    assert "cat_sigma_0.000.npz: latent [1, 2, 2, 16], 'a cat'\n" in capsys.readouterr().out
    with np.load(tmp_path / "out" / "cat_sigma_0.000.npz") as arrays:
        clean = dict(arrays)
    np.testing.assert_array_equal(clean["truth"][0], make.photo[4:36, 9:41])
    assert clean["lq"].shape == (1, 16, 16, 3) and clean["prompt"] == ["a cat"]
    codec = build_codec("dct")
    small = images.to_float(clean["lq"])
    np.testing.assert_allclose(clean["latent"], codec.encode(small), atol=0.1)
    noised = latent_files.read(tmp_path / "out" / "cat_sigma_0.500.npz", 16, "dct")
    assert noised.sigma == [0.5] and noised.prompts == ["a cat"]
    assert np.abs(noised.latents - clean["latent"]).max() > 0.1


def test_a_training_reads_them_as_one_batch(make, tmp_path):
    make("--sigmas", "0,0.5", "--prompt", "words")
    batch = fixed_inputs.read([str(tmp_path / "out")], build_codec("dct"), 2)
    assert batch["latent"].shape == (2, 2, 3, 16) and batch["truth"].shape == (2, 32, 48, 3)
    assert batch["small"].shape == (2, 16, 24, 3) and batch["caption"] == ["words"] * 2
    np.testing.assert_array_equal(batch["sigma"], np.float32([0, 0.5]))
    with pytest.raises(UserError, match="checkpoint reads 'dct2' latents with 6 channels"):
        fixed_inputs.read([str(tmp_path / "out")], build_codec("dct", block=2), 2)
    with pytest.raises(UserError, match="'truth' of 32 x 48 pixels; .* 64 x 96 .*sr_scale 4"):
        fixed_inputs.read([str(tmp_path / "out")], build_codec("dct"), 4)
    make("--size", "32x32")
    with pytest.raises(UserError, match="several shapes"):
        fixed_inputs.read([str(tmp_path / "out")], build_codec("dct"), 2)
    with pytest.raises(UserError, match="holds no .npz file"):
        fixed_inputs.read([str(tmp_path / "in")], build_codec("dct"), 2)
    np.savez(tmp_path / "loud.npz", latent=np.zeros((1, 2, 2, 16), np.float32), sigma=[1.5])
    with pytest.raises(UserError, match="sigma 1.5 is no noise level"):
        fixed_inputs.read([str(tmp_path / "loud.npz")], build_codec("dct"), 2)


@pytest.mark.parametrize("arguments, sentence", [
    (("--size", "24x32"), "both sides must be multiples of 16"),
    (("--size", "64x64"), "smaller than the 64 x 64"),
    (("--seed", "99999999999999999999"), "seed"), (("--seed", "-1"), "seed"),
    (("--sigmas", "2"), "sigma 2.0 is no noise level"),
    (("--codec_option", "block"), "write NAME=VALUE"),
    (("--codec_option", "block=3"), "blocks of 8, 4 or 2"),
])
def test_bad_input_is_one_sentence(make, capsys, arguments, sentence):
    assert make(*arguments) == 2
    assert sentence in capsys.readouterr().err
