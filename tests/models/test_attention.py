"""Dense attention against numpy, with text, masks and low precision."""

import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.models.attention import dense_attention, softmax_attention


def tokens(length, seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(2, length, 3, 4)).astype(np.float32) for _ in range(3)]


def numpy_attention(q, k, v, allowed=None):
    scores = np.einsum("bqhd,bkhd->bhqk", q, k).astype(np.float64) / 2
    if allowed is not None:
        scores = np.where(allowed[:, None, None, :], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


def test_image_alone():
    q, k, v = tokens(5, 0)
    out, text = dense_attention(q, k, v)
    assert text is None
    np.testing.assert_allclose(out, numpy_attention(q, k, v), atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_text_and_image_attend_to_both(masked):
    image, text = tokens(5, 0), tokens(3, 1)
    mask = np.random.default_rng(2).random((2, 8)) < 0.6 if masked else None
    joined = [np.concatenate(pair, axis=1) for pair in zip(text, image)]
    expected = numpy_attention(*joined, allowed=mask)
    image_out, text_out = dense_attention(*image, *text, key_mask=mask)
    np.testing.assert_allclose(text_out, expected[:, :3], atol=1e-6)
    np.testing.assert_allclose(image_out, expected[:, 3:], atol=1e-6)


def test_a_query_without_any_key_gets_zeros():
    q, k, v = tokens(5, 0)
    mask = np.array([[True] * 5, [False] * 5])
    out = softmax_attention(q, k, v, mask)
    assert not np.any(out[1])
    np.testing.assert_allclose(out[0], numpy_attention(q, k, v)[0], atol=1e-6)


def test_bfloat16_stays_close():
    q, k, v = tokens(5, 0)
    out = softmax_attention(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), numpy_attention(q, k, v), atol=0.03)
