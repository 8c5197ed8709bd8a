import hashlib

import numpy as np
import pytest

from pid_jax.encoders import TextEncoder, build_text_encoder
from pid_jax.encoders.hashed_text import tokens
from pid_jax.errors import UserError

CAPTIONS = ["A red cat, on a mat!", "红色的猫坐在垫子上", "हिन्दी भाषा", "Ελληνικά", "قطة حمراء",
            "😀 emoji", "\ud800 lone", ""]


@pytest.fixture
def encoder():
    return build_text_encoder("hashed", width=48, length=12)


def test_shape_type_and_scale(encoder):
    embedded = encoder.embed(CAPTIONS)
    assert isinstance(encoder, TextEncoder)
    assert embedded.shape == (len(CAPTIONS), 12, 48) and embedded.dtype == np.float32
    np.testing.assert_allclose(np.mean(embedded**2, axis=-1), 1, atol=1e-5)


def test_digest_is_pinned(encoder):
    digest = hashlib.sha256(encoder.embed(CAPTIONS).astype("<f4").tobytes()).hexdigest()
    assert digest == "c2f4c006b50b31fef0248986116429fa70778f667a97439cd23a49cf6d19f9e5"


def test_empty_caption_is_null(encoder):
    np.testing.assert_array_equal(encoder.embed(["", " \n\t"]), [encoder.null, encoder.null])
    assert not encoder.null.flags.writeable


def test_a_token_is_the_same_at_every_position(encoder):
    first, later = encoder.embed(["cat", "one two CAT"])
    np.testing.assert_array_equal(first[0], later[2])


def test_similar_words_are_nearer_than_different_ones(encoder):
    cat, cats, dog = encoder.embed(["kitten", "kittens", "harbour"])[:, 0]
    assert cat @ cats > 0.3 * 48 > abs(cat @ dog)


def test_long_captions_are_cut(encoder):
    assert encoder.embed(["word " * 500]).shape == (1, 12, 48)


def test_no_captions(encoder):
    assert encoder.embed([]).shape == (0, 12, 48)


@pytest.mark.parametrize("caption, expected", [
    ("A red cat, on", ["a", "red", "cat", ",", "on"]),
    ("红猫cat图", ["红", "猫", "cat", "图"]),
    ("ｆｕｌｌ　width", ["full", "width"]),
    ("x" * 50, ["x" * 24, "x" * 24, "xx"]),
])
def test_tokens(caption, expected):
    assert list(tokens(caption)) == expected


@pytest.mark.parametrize("options, hint", [
    ({"widht": 4}, "did you mean 'width'"), ({"width": 0}, "at least 8"), ({"length": 2.5}, "2.5")])
def test_bad_options(options, hint):
    with pytest.raises(UserError, match=hint):
        build_text_encoder("hashed", **options)
