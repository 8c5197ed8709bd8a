import numpy as np
import pytest

from pid_jax.data import latent_files
from pid_jax.errors import UserError
from tests.golden.cases import COMMITTED
from tests.tools import forge
from tools.convert_torch_weights import cli
from tools.convert_torch_weights.fix_batch import read_fix_batch

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
