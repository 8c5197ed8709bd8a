import collections

import pytest

from pid_jax.data import captions


def test_choice_is_uniform_over_draws():
    counts = collections.Counter(captions.choose(("a", "b", "c"), i / 300) for i in range(300))
    assert counts == {"a": 100, "b": 100, "c": 100}


def test_dropout_takes_its_share():
    kept = [captions.drop("x", i / 100, 0.1) for i in range(100)]
    assert kept.count("") == 10
    assert captions.drop("x", 0.0, 0.0) == "x" and captions.drop("x", 0.999, 1.0) == ""


@pytest.mark.parametrize("value", [None, 3, ["a"], {}, {"prompt": 4}, {"prompt": ""}])
def test_nothing_usable(value):
    assert captions.named_captions(value) == {}
    assert captions.extract_captions({"caption": value}) == ()


def test_deeply_nested_dicts_are_unwrapped():
    value = {"captions": {"caption": {"captions": {"prompt": "p"}}}}
    assert captions.extract_captions({"caption": value}) == ("p",)


def test_own_fields():
    assert captions.named_captions({"fr": "chat", "prompt": "cat"}, ("fr",)) == {"fr": "chat"}
