import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from pid_jax.errors import UserError
from pid_jax.evaluation import inception


def zeros():
    return {name: np.zeros(shape, np.float32) for name, shape in
            inception.tensor_shapes().items()}


def test_there_are_94_convolutions_of_23_million_weights():
    shapes = inception.convolutions()
    assert len(shapes) == 94
    total = sum(int(np.prod(shape)) for shape in inception.tensor_shapes().values())
    assert total == 23_885_392  # 1008 classes, batch norms with statistics


def test_shapes_of_all_features():
    params = jax.eval_shape(lambda: jax.tree.map(
        jax.numpy.asarray, inception.fold(zeros(), "zeros")))
    out = jax.eval_shape(inception.inception, params,
                         jax.ShapeDtypeStruct((2, 32, 48, 3), np.uint8))
    assert out.pooled.shape == (2, 2048) and out.spatial.shape == (2, 2023)
    assert out.logits.shape == out.logits_unbiased.shape == (2, 1008)
    assert [s.shape[1] for s in out.shallow] == [64, 192, 768]


def test_folding_is_the_batch_norm(tmp_path):
    tensors = zeros()
    rng = np.random.default_rng(0)
    for part, value in (("conv.weight", rng.standard_normal((32, 3, 3, 3))),
                        ("bn.weight", rng.standard_normal(32)), ("bn.bias", np.ones(32)),
                        ("bn.running_mean", rng.standard_normal(32)),
                        ("bn.running_var", np.full(32, 4.0))):
        tensors[f"Conv2d_1a_3x3.{part}"] = value.astype(np.float32)
    save_file(tensors, tmp_path / "weights.safetensors")
    folded = inception.load_inception(tmp_path / "weights.safetensors")["Conv2d_1a_3x3"]
    scale = tensors["Conv2d_1a_3x3.bn.weight"] / np.sqrt(4 + 1e-3)
    assert np.allclose(folded["kernel"][1, 2, 0],
                       tensors["Conv2d_1a_3x3.conv.weight"][:, 0, 1, 2] * scale, atol=1e-6)
    assert np.allclose(folded["bias"],
                       1 - tensors["Conv2d_1a_3x3.bn.running_mean"] * scale, atol=1e-6)


def test_other_weights_and_files_are_refused(tmp_path):
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="472 of 472 tensors are missing"):
        inception.load_inception(tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"not tensors")
    with pytest.raises(UserError, match="no readable"):
        inception.load_inception(tmp_path / "broken.safetensors")
    with pytest.raises(UserError, match="no weight file"):
        inception.load_inception(tmp_path / "none.npz")
