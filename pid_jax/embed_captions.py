"""Embeds every caption of a run once, so that training need not hold the text encoder.

    python -m pid_jax.embed_captions --config=configs/pid_teacher_flux_2k.py --dst=captions
    python -m pid_jax.main --config=configs/pid_teacher_flux_2k.py --config.text.stored=captions ...

Captions are those of `config.data.path` and of the held-out pictures (the fields of
`config.data.caption_fields`), the empty one, and the prompts of the samples. On many hosts, give
each its `--process=I --processes=N`; started again, a process goes on after its last whole file.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from absl import flags
from ml_collections import ConfigDict
from safetensors.flax import save

from pid_jax import command_line, embedding_command, encoders
from pid_jax.data.sources import open_data, source_table
from pid_jax.encoders.protocols import TextEncoder
from pid_jax.encoders.stored_text import DIGEST_BYTES, FORMAT, digest
from pid_jax.errors import UserError
from pid_jax.files import atomic_write

flags.adopt_module_key_flags(embedding_command)


def main() -> None:
    """Embeds the share of this process."""
    embed(*embedding_command.parse())


def embed(config: ConfigDict, folder: Path, process: int = 0, processes: int = 1,
          rows: int = 512) -> None:
    """Writes the embeddings of this process's share of the captions, in files of `rows`.

    Raises:
      UserError: no data set, no weights, or a folder with files of other captions.
    """
    encoder = encoders.build_text_encoder(**config.text)
    captions = share(captions_of(config), process, processes)
    names = []
    for part, start in enumerate(range(0, len(captions), rows)):
        name = f"captions-{process:05d}-{part:05d}.safetensors"
        write_file(folder / name, encoder, captions[start:start + rows], config.text.to_dict())
        names.append(name)
        print(f"{folder / name}: {min(start + rows, len(captions))} of {len(captions)} captions",
              flush=True)
    manifest = {"format": FORMAT, "width": encoder.width, "length": encoder.length,
                "files": names, "text": config.text.to_dict()}
    with atomic_write(folder / f"captions-{process:05d}-of-{processes:05d}.json") as file:
        json.dump(manifest, file, indent=1)


def captions_of(config: ConfigDict) -> set[str]:
    """Every text that a run of this config can ask for."""
    if not config.data.path:
        raise UserError("config.data.path is not set: name the data set whose captions are meant")
    found = {"", config.sample.negative_prompt, *config.sample.prompts}
    for path, names in ((config.data.path, config.data.sources), (config.sample.heldout, ())):
        if not path:
            continue
        data = open_data(path, names)
        fields = {f for s in source_table(data) for f in s.caption_fields or ()}
        for captions in data.captions():
            texts = map(captions.get, {*config.data.caption_fields, *fields})
            found.update(filter(None, texts))
    return found


def share(captions: set[str], process: int, processes: int) -> list[str]:
    """The captions of one process in an order that depends on the captions alone."""
    return sorted(captions, key=digest)[process::processes]


def write_file(path: Path, encoder: TextEncoder, captions: Sequence[str],
               text: dict[str, Any]) -> None:
    """One file; a whole one of the same captions by the same encoder is kept.

    Args: text: the config's section.
    """
    digests = np.frombuffer(b"".join(map(digest, captions)), np.uint8).reshape(-1, DIGEST_BYTES)
    made_by = {"text": json.dumps(settings(text), sort_keys=True)}
    if path.exists():
        _check_same(path, digests, made_by)
        return
    embedding = encoder.embed(captions).astype(ml_dtypes.bfloat16)
    with atomic_write(path, "wb") as file:
        file.write(save({"digest": digests, "embedding": embedding}, made_by))


def settings(text: dict[str, Any]) -> dict[str, Any]:
    """What the embeddings depend on."""
    return {name: value for name, value in text.items() if name not in ("stored", "batch")}


def _check_same(path: Path, digests: np.ndarray, made_by: dict[str, str]) -> None:
    try:
        with safetensors.safe_open(path, "numpy") as file:
            same = file.metadata() == made_by and np.array_equal(file.get_tensor("digest"), digests)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} is damaged: {error}; remove it") from error
    if not same:
        raise UserError(f"{path} holds embeddings of other captions, or by another encoder; choose "
                        "an empty --dst, or remove the folder")


if __name__ == "__main__":
    sys.exit(command_line.run(main, sys.argv))
