"""Token files and token caches."""

import numpy as np
import pytest

from pid_jax.config import base_config
from pid_jax.data import token_cache, token_files
from pid_jax.data.dataset import Dataset
from pid_jax.data.labels import class_numbers
from pid_jax.errors import UserError
from tests import tiny

PRINT = "ab" * 32


@pytest.mark.parametrize("size, payload", [(4096, 48), (1024, 40), (64, 24), (3, 8)])
def test_round_trip_and_size(size, payload):
    indices = np.random.default_rng(size).integers(0, size, 32).astype(np.int32)
    data = token_files.to_bytes(indices, size, PRINT)
    assert len(data) == 16 + payload
    np.testing.assert_array_equal(token_files.from_bytes(data, size, PRINT, "x"), indices)


@pytest.mark.parametrize("change, sentence", [
    (lambda d: b"", "is no token file"), (lambda d: d[:-1], "is damaged"),
    (lambda d: d[:4] + b"\x09" + d[5:], "is damaged"), (lambda d: d + b"\0", "is damaged")])
def test_damage_is_named(change, sentence):
    data = token_files.to_bytes(np.arange(32), 4096, PRINT)
    with pytest.raises(UserError, match=sentence):
        token_files.from_bytes(change(data), 4096, PRINT, "x")


def test_another_tokenizer_is_refused():
    data = token_files.to_bytes(np.arange(32), 4096, PRINT)
    for size, fingerprint in ((4096, "cd" * 32), (1024, PRINT)):
        with pytest.raises(UserError, match="made by another tokenizer"):
            token_files.from_bytes(data, size, fingerprint, "x")


class Net:
    num_latent_tokens = 4


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return tiny.write_dataset(tmp_path_factory.mktemp("tokens") / "data", count=3)


def saved(packed, folder, **changes):
    cache = token_cache.TokenCache(np.arange(12, dtype=np.int32).reshape(3, 4),
                                   Dataset(packed).fingerprint, 32, "adm",
                                   token_cache.digest({"a": np.ones(2)}))
    path = folder / "cache.npz"
    cache.save(path)
    data = base_config().data
    data.update({"path": str(packed), "image_size": 32, "resize": "adm", **changes})
    return str(path), data


def test_a_cache_gives_the_tokens_of_records(packed, tmp_path):
    cache = token_cache.TokenCache.open(*saved(packed, tmp_path), Net())
    assert cache.of_records(np.array([2, 0])).tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    cache.check_tokenizer({"a": np.ones(2)})
    with pytest.raises(UserError, match="made by another tokenizer"):
        cache.check_tokenizer({"a": np.zeros(2)})


@pytest.mark.parametrize("changes, sentence", [
    ({"flip": True}, "config.data.flip is True"), ({"image_size": 64}, "this run has 64"),
    ({"resize": "fit"}, "this run has 'fit'"), ({"crop": "random"}, "config.data.crop")])
def test_a_cache_of_other_pictures_is_refused(packed, tmp_path, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        token_cache.TokenCache.open(*saved(packed, tmp_path, **changes), Net())


def test_a_file_that_is_no_cache_is_refused(tmp_path):
    path = tmp_path / "cache.npz"
    path.write_bytes(b"nothing")
    with pytest.raises(UserError, match="is no token cache"):
        token_cache.TokenCache.read(path)


def test_class_numbers_of_captions():
    assert class_numbers(["7", "", " 0 "], 8).tolist() == [7, 8, 0]
    for caption in ("8", "-1", "a cat", "٣"):
        with pytest.raises(UserError, match="is no class"):
            class_numbers([caption], 8)
