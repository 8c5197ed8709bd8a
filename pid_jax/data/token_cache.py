"""Tokens of every picture of a data set, made once by `python -m pid_jax.tokens cache`.

The file is an .npz with `indices` int32 [records, K] and what they depend on: the data set's
fingerprint, the picture size and resize rule, and a checksum of the tokenizer's weights.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict

from pid_jax.data.dataset import read_manifest
from pid_jax.errors import UserError
from pid_jax.files import atomic_write
from pid_jax.tensor_files import read_npz

FIXED = {"crop": ("center",), "resize": ("fit", "adm"), "decode": ("exact",), "flip": (False,),
         "permute_colours": (False,), "buckets": ("square",)}
"""Data options under which a picture is always the same."""


@dataclasses.dataclass(frozen=True)
class TokenCache:
    """Attributes:
      indices: int32 [records, K].
      fingerprint: of the data set.
      image_size, resize: how a record became a picture.
      tokenizer: `digest` of the frozen weights.
    """

    indices: np.ndarray
    fingerprint: str
    image_size: int
    resize: str
    tokenizer: str

    @classmethod
    def open(cls, path: str, data: ConfigDict, net: Any) -> "TokenCache":
        """Reads a cache and checks that it belongs to the run's data and network.

        Raises UserError when it does not, or when the data options draw at random.
        """
        check_fixed(data)
        cache = cls.read(Path(path))
        wanted = {"fingerprint": read_manifest(Path(data.path))["fingerprint"],
                  "image_size": data.image_size, "resize": data.resize}
        for name, value in wanted.items():
            if getattr(cache, name) != value:
                raise UserError(f"the token cache {path} was made for {name} "
                                f"{getattr(cache, name)!r}, this run has {value!r}: make it anew")
        if cache.indices.shape[1] != net.num_latent_tokens:
            raise UserError(f"the token cache {path} holds {cache.indices.shape[1]} tokens a "
                            f"picture, the network reads {net.num_latent_tokens}")
        return cache

    @classmethod
    def read(cls, path: Path) -> "TokenCache":
        """Reads a cache; UserError when the file is none."""
        try:
            file = read_npz(path)
            cache = cls(file["indices"], str(file["fingerprint"]), int(file["image_size"]),
                        str(file["resize"]), str(file["tokenizer"]))
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{path} is no token cache ({error}); make one with `python -m "
                            "pid_jax.tokens cache`") from error
        if cache.indices.ndim != 2 or cache.indices.dtype != np.int32:
            raise UserError(f"{path} is no token cache: its indices are {cache.indices.dtype} "
                            f"{cache.indices.shape}")
        return cache

    def save(self, path: Path) -> None:
        """Writes the file, complete or not at all."""
        with atomic_write(path, "wb") as file:
            np.savez(file, **dataclasses.asdict(self))

    def of_records(self, records: np.ndarray) -> np.ndarray:
        """int32 [B, K] of record numbers [B]."""
        return self.indices[records]

    def check_tokenizer(self, weights: Any) -> None:
        """Refuses tokenizer weights other than those that made the cache."""
        if digest(weights) != self.tokenizer:
            raise UserError("the token cache was made by another tokenizer than the run's frozen "
                            "weights: make it anew, or leave config.ditok.token_cache unset")


def check_fixed(data: ConfigDict) -> None:
    """Raises UserError for data options that show a picture in more than one way."""
    for name, values in FIXED.items():
        if data[name] not in values:
            raise UserError(f"a token cache needs pictures that are always the same, but "
                            f"config.data.{name} is {data[name]!r}; set it to {values[0]!r}")


def digest(weights: Any) -> str:
    """SHA-256 of the float32 values of a parameter tree, in the order of their paths."""
    found = hashlib.sha256()
    for path, leaf in sorted(traverse_util.flatten_dict(weights, sep="/").items()):
        found.update(path.encode())
        found.update(np.ascontiguousarray(jax.device_get(leaf), np.float32).tobytes())
    return found.hexdigest()
