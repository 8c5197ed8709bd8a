import numpy as np
import pytest

from pid_jax.data import latent_files
from pid_jax.errors import UserError
from tests.golden.cases import COMMITTED
from tests.tools import forge
from tools.convert_torch_weights import cli, fix_batch
from tools.convert_torch_weights.fix_batch import read_fix_batch
from tools.convert_torch_weights.readers import LazyTensor

FOLDER = COMMITTED / "encoders" / "fix_batches"


def test_decode_reads_the_converted_file(tmp_path):
    source, target = FOLDER / "fix_batch_0001.pt", tmp_path / "batch.npz"
    assert cli.main(["fix-batch", "--src", str(source), "--dst", str(target)]) == 0
    batch = read_fix_batch(source)
    found = latent_files.read(target, batch.latents.shape[-1], "sdxl")
    np.testing.assert_array_equal(found.latents, batch.latents)
    assert found.prompts == list(batch.captions)
    np.testing.assert_allclose(found.sigma, batch.sigma)
    np.testing.assert_array_equal(found.small, batch.small)
    assert found.truth is None  # a placeholder stands in its place


def test_the_older_form_has_its_original():
    batch = read_fix_batch(FOLDER / "fix_batch_legacy_0099.pt")
    assert batch.large.shape == (1, 128, 192, 3) and batch.captions == ("legacy caption",)


@pytest.mark.parametrize("program, words", [
    (forge.dictionary(LQ_latent=b"cos\nsystem\n" + forge.text("true") + b"\x85R"),
     "nothing was run"),
    (forge.dictionary(caption=forge.text("a")), "LQ_latent")], ids=["hostile", "no latent"])
def test_other_files_are_refused(tmp_path, program, words):
    path = forge.torch_zip(tmp_path / "bad.pt", program)
    with pytest.raises(UserError, match=words):
        read_fix_batch(path)
    assert cli.main(["fix-batch", "--src", str(path), "--dst", str(tmp_path / "x.npz")]) == 2
    assert cli.main(["fix-batch", "--src", str(FOLDER / "fix_batch_0000.pt"),
                     "--dst", str(tmp_path / "x.png")]) == 2


def tensor(*shape):
    return LazyTensor("x", np.dtype(np.float32), shape, lambda: np.zeros(shape, np.float32))


@pytest.mark.parametrize("entry, words", [
    ({"degrade_sigma": "high"}, "degrade_sigma.*no noise level for each of 1 latents"),
    ({"degrade_sigma": 10**400}, "no noise level"), ({"degrade_sigma": {}}, "no noise level"),
    ({"degrade_sigma": tensor(3)}, "no noise level"), ({"degrade_sigma": []}, "no noise level"),
    ({"LQ_latent": tensor()}, "LQ_latent.*shape"), ({"LQ_latent": tensor(0, 16, 2, 2)}, "shape"),
    ({"LQ_video_or_image": tensor(3, 4)}, r"LQ_video_or_image.*\(3, 4\)"),
    ({"LQ_video_or_image": tensor(1, 3, 0, 0)}, "shape"),
    ({"HQ_video_or_image": tensor(1, 5, 4, 4)}, "HQ_video_or_image.*shape")])
def test_entries_that_do_not_fit_are_named(monkeypatch, entry, words):
    path = FOLDER / "fix_batch_0000.pt"
    held = fix_batch.read_everything(path) | entry
    monkeypatch.setattr(fix_batch, "read_everything", lambda _: held)
    with pytest.raises(UserError, match=words):
        read_fix_batch(path)
