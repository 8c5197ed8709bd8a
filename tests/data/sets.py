"""Small pictures and data sets for tests."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from pid_jax.data.dataset import Dataset, DatasetWriter
from pid_jax.data.records import Record


def picture(width=40, height=30, seed=0) -> Image.Image:
    """A smooth picture that differs with the seed."""
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows / (3 + c) + seed) + np.cos(columns / (4 + c) - seed) for c in range(3)]
    return Image.fromarray(((np.stack(waves, -1) + 2) * 63).astype(np.uint8))


def encoded(image: Image.Image, kind="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def record(number: int, width=40, height=30) -> Record:
    captions = {"prompt": f"picture number {number}", "prompt_short": f"number {number}"}
    data = encoded(picture(width, height, number))
    return Record(f"p{number:03d}", "test", width, height, captions, data)


def dataset(folder, sizes, shard_bytes=8_000) -> Dataset:
    """A data set with one picture of each (width, height), in several shards."""
    with DatasetWriter(folder, shard_bytes) as writer:
        for number, size in enumerate(sizes):
            writer.add(record(number, *size))
    return Dataset(folder)


def damage(folder, key: str) -> None:
    """Overwrites a few bytes inside one record of a data set."""
    data = Dataset(folder)
    number = [data.index.key[i] for i in range(len(data))].index(key)
    image = data[number].image
    for shard in data.manifest["shards"]:
        path = folder / shard["file"]
        content = bytearray(path.read_bytes())
        if (start := content.find(image)) >= 0:
            content[start + 60:start + 64] = b"\0\0\0\0"
            path.write_bytes(content)


def tar(path: Path, members: dict[str, bytes | tarfile.TarInfo]) -> Path:
    """Writes a tar; a TarInfo is a member without contents, such as a link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            entry = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            entry.name = name
            if not isinstance(content, tarfile.TarInfo):
                entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content) if isinstance(content, bytes) else None)
    return path
