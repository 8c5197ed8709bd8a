"""Caption embeddings that were computed once and are read from disk: training then needs no Gemma.

A folder holds, for every process that embedded, `captions-I-of-N.json` (width, length, its files)
and files `captions-I-P.safetensors` with `digest` uint8 [R, 16] and `embedding` bfloat16 [R, T, E].
`python -m pid_jax.embed_captions` makes it. A caption is found by the digest of its text.
"""

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pid_jax.encoders.weights import read_tensors
from pid_jax.errors import UserError

FORMAT = 1
DIGEST_BYTES = 16
_MANIFEST = re.compile(r"captions-(\d+)-of-(\d+)\.json")
_FILE = re.compile(r"captions-\d+-\d+\.safetensors")


def digest(caption: str) -> bytes:
    """16 bytes that stand for a caption."""
    text = caption.encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).digest()[:DIGEST_BYTES]


class StoredTextEncoder:
    """A `TextEncoder` that looks captions up.

    Attributes:
      width, length: E and T of the embeddings.
      made_by: the config section `text` of the command that made them.
    """

    def __init__(self, folder: str | Path):
        """Raises: UserError when the folder is no complete set of embeddings."""
        self._folder = Path(folder)
        manifests = _read_manifests(self._folder)
        self.width, self.length = manifests[0]["width"], manifests[0]["length"]
        self.made_by = manifests[0]["text"]
        files = [name for manifest in manifests for name in manifest["files"]]
        self._tensors = [_read_file(self._folder, name) for name in files]
        digests = np.concatenate([tensors["digest"] for tensors in self._tensors])
        places = [(part, row) for part, tensors in enumerate(self._tensors)
                  for row in range(len(tensors["digest"]))]
        keys = np.ascontiguousarray(digests).view(f"S{DIGEST_BYTES}").reshape(-1)
        self._order = np.argsort(keys, kind="stable")
        self._keys, self._places = keys[self._order], np.array(places)[self._order]

    @functools.cached_property
    def null(self) -> np.ndarray:
        """float32 [T, E], the embedding of the empty caption."""
        return self.embed([""])[0]

    def embed(self, captions: Sequence[str]) -> np.ndarray:
        """B captions -> float32 [B, T, E]. Raises: UserError for one that is not stored."""
        return np.stack([self._row(caption) for caption in captions])

    def _row(self, caption: str) -> np.ndarray:
        key = np.frombuffer(digest(caption), f"S{DIGEST_BYTES}")[0]
        place = np.searchsorted(self._keys, key)
        if place == len(self._keys) or self._keys[place] != key:
            raise UserError(f"the embeddings in {self._folder} lack the caption {caption[:80]!r}; "
                            "run `python -m pid_jax.embed_captions` with the config of this run")
        part, row = self._places[place]
        return np.asarray(self._tensors[part]["embedding"][row], np.float32)


def _read_manifests(folder: Path) -> list[dict]:
    """The manifests of all processes."""
    names = sorted(p.name for p in folder.glob("captions-*.json")) if folder.is_dir() else []
    matches = [match for name in names if (match := _MANIFEST.fullmatch(name))]
    totals = {int(match[2]) for match in matches}
    if len(totals) != 1 or len(matches) != max(totals):
        raise UserError(f"{folder} holds no complete caption embeddings (found: "
                        f"{', '.join(names) or 'nothing'}); make them with `python -m "
                        "pid_jax.embed_captions`, every process of it")
    manifests = [_read_manifest(folder / match[0]) for match in matches]
    first = manifests[0]
    if any(m[name] != first[name] for m in manifests for name in ("width", "length", "text")):
        raise UserError(f"the caption embeddings in {folder} are of different sizes or by "
                        "different encoders; make them again")
    return manifests


def _read_manifest(path: Path) -> dict:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        sound = (manifest["format"] == FORMAT and isinstance(manifest["width"], int)
                 and isinstance(manifest["length"], int) and isinstance(manifest["text"], dict)
                 and all(_FILE.fullmatch(name) for name in manifest["files"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}; make the embeddings again") from error
    if not sound:
        raise UserError(f"{path} is no list of caption embeddings of this version")
    return manifest


def _read_file(folder: Path, name: str) -> dict[str, np.ndarray]:
    try:
        return read_tensors(folder / name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / name} cannot be read: {error}; make it again") from error
    except Exception as error:  # safetensors has an error type of its own
        raise UserError(f"{folder / name} is damaged: {error}; make it again") from error
