"""Pictures with a class: labels from folders or from a TFDS data set, ADM's centre crop.

The label is kept as the caption `label`, the class's number as digits.
"""

import dataclasses
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from pid_jax import images
from pid_jax.data.geometry import adm_crop
from pid_jax.data.ingest.pack import Item, Skip, check_side
from pid_jax.errors import UserError, one_line

LABEL = "label"


def class_folders(source: Path) -> list[str]:
    """The sub-folders of `source`, sorted by name: class k is the k-th (ImageNet's WordNet names
    sorted give its usual numbers). UserError when there is none."""
    if not source.is_dir():
        raise UserError(f"the source {source} is not a folder")
    names = sorted(entry.name for entry in source.iterdir()
                   if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise UserError(f"{source} holds no folders; --labels folders needs one for each class")
    return names


def numbering(classes: list[str]) -> str:
    """Tells numberings of classes apart: their count and a digest of their names in order."""
    names = hashlib.sha256("\n".join(classes).encode("utf-8", "surrogateescape"))
    return f"{len(classes)} folders {names.hexdigest()[:12]}"


def with_folder_labels(items: Iterable[Item | Skip], classes: list[str]) -> Iterator[Item | Skip]:
    """Each item with the number of its top folder as its label, its captions kept."""
    numbers = {name: str(number) for number, name in enumerate(classes)}
    for item in items:
        folder = item.name.split("/")[0]
        if isinstance(item, Skip):
            yield item
        elif folder not in numbers:
            yield Skip(item.name, "it lies in no class's folder")
        else:
            yield dataclasses.replace(item, captions=_labelled(item, numbers[folder]))


def _labelled(item: Item, label: str) -> Callable[[], Mapping[str, str]]:
    return lambda: {**item.captions(), LABEL: label}


def tfds_items(name: str, split: str, data_dir: Path | None = None) -> Iterator[Item | Skip]:
    """Items of a prepared TFDS data set with the features `image` and `label`.

    Read through its random-access data source, so TensorFlow runs nothing. The picture files are
    taken as they are.
    Args:
      name: such as "imagenet2012"; the set must be prepared in the array_record format
        (`tfds build --file_format=array_record`), nothing is downloaded.
    Raises:
      UserError: there is no such prepared set, or it has no labels.
    """
    source = _tfds_source(name, split, data_dir)
    for number in range(len(source)):
        yield Item(f"{split}/{number:08d}", f"{name} {split} {number}",
                   lambda number=number: _bytes(_row(source, number)["image"]),
                   lambda number=number: {LABEL: str(int(_row(source, number)[LABEL]))})


def _row(source: Any, number: int) -> Mapping[str, Any]:
    try:
        return source[number]
    except Exception as error:  # what TFDS's readers raise about a damaged file
        raise UserError(f"TFDS cannot read it: {one_line(error, 200)}") from error


def _tfds_source(name: str, split: str, data_dir: Path | None) -> Any:
    import tensorflow_datasets as tfds
    try:
        builder = tfds.builder(name, data_dir=data_dir)
        missing = {"image", LABEL} - set(builder.info.features)
        if not missing:
            return builder.as_data_source(
                split=split, decoders={"image": tfds.decode.SkipDecoding()})
    except Exception as error:  # TFDS raises many kinds for sets that are not there or not prepared
        reason = one_line(error, 200)
        raise UserError(f"the TFDS data set {name} ({split}) cannot be read: {reason}; prepare it "
                        "with `tfds build --file_format=array_record`") from error
    raise UserError(f"the TFDS data set {name} has no {', '.join(sorted(missing))}; labelled "
                    "pictures need image and label")


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else bytes(value)


# ---- centre crop --------------------------------------------------------------------------------

def cropped(items: Iterable[Item | Skip], size: int, min_side: int = 1) -> Iterator[Item | Skip]:
    """Items whose pictures are PNG files of `size` x `size`, cut by `adm_crop`; those that were
    smaller than `min_side` are skipped."""
    for item in items:
        yield item if isinstance(item, Skip) else dataclasses.replace(
            item, read=lambda item=item: _square(item.read(), size, min_side))


def _square(data: bytes, size: int, min_side: int) -> bytes:
    picture = images.decode(data)
    check_side(picture.size, min_side)
    return _png(adm_crop(picture, size))


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()
