import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.evaluation.inception import read_tensors
from tests.tools import forge
from tools.convert_torch_weights import cli
from tools.convert_torch_weights.plain import rewrite


def test_tensors_keep_names_and_numbers(tmp_path, capsys):
    arrays = {"conv.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
              "bn.num_batches_tracked": np.asarray(3, np.int64)}
    forge.save(tmp_path / "weights.pth", arrays)
    dst = tmp_path / "weights.safetensors"
    assert cli.main(["tensors", "--src", str(tmp_path / "weights.pth"), "--dst", str(dst)]) == 0
    assert "1 tensor" in capsys.readouterr().out
    found = read_tensors(dst)
    assert list(found) == ["conv.weight"]
    np.testing.assert_array_equal(found["conv.weight"], arrays["conv.weight"])


def test_what_cannot_be_written(tmp_path):
    forge.save(tmp_path / "whole.pth", {"count": np.asarray(3, np.int64)})
    with pytest.raises(UserError, match="no floating-point tensors"):
        rewrite(str(tmp_path / "whole.pth"), tmp_path / "out.safetensors")
    with pytest.raises(UserError, match="expected .safetensors"):
        rewrite(str(tmp_path / "whole.pth"), tmp_path / "out.npz")
    (tmp_path / "there.safetensors").touch()
    with pytest.raises(UserError, match="--overwrite"):
        rewrite(str(tmp_path / "whole.pth"), tmp_path / "there.safetensors")
