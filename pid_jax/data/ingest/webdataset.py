"""WebDataset tars: single ones, or the reference's pairs of `image/` and `caption/` tars.

A pair is `[aspect_ratio_X_Y/]image/part_P/S.tar` with `.../caption/part_P/S.tar`: the picture and
the caption of a sample have the same name in both. Nothing is unpacked: a member is read where it
lies in its tar.
"""

import dataclasses
import functools
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from pid_jax.data.ingest.folder import (PARSERS, PICTURE_SUFFIXES, Named, check_missing,
                                        check_place, parse_sidecar)
from pid_jax.data.ingest.pack import LARGEST_FILE, Item, Skip
from pid_jax.errors import UserError

IMAGE, CAPTION = "image", "caption"
CLASS = ".cls"  # a class's number, kept as the caption `label`
_BLOCK = tarfile.BLOCKSIZE


@dataclasses.dataclass(frozen=True)
class Member:
    """A file in a tar: where its bytes are."""

    tar: Path
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        """Its bytes, at most one more than can be packed."""
        with open(self.tar, "rb") as file:
            file.seek(self.offset)
            return file.read(min(self.size, LARGEST_FILE + 1))


def webdataset_items(source: Path, missing: str = "skip") -> Iterator[Item | Skip]:
    """Every sample of the tars in `source`, tar by tar; its key is the members' common name.

    Args:
      source: a folder, searched to any depth, or one tar; compressed tars are not read.
      missing: see `folder.folder_items`.
    Raises: UserError when there are no tars.
    """
    root = source if source.is_dir() else source.parent
    tars = sorted(source.rglob("*.tar")) if source.is_dir() else [source]
    if not tars or not tars[0].is_file():
        raise UserError(f"{source} holds no .tar files; expected a folder of WebDataset tars")
    for tar in tars:
        yield from tar_items(tar, root, missing)


def tar_items(tar: Path, root: Path, missing: str) -> Iterator[Item | Skip]:
    """The samples of one tar in `root`; a caption tar has none of its own."""
    if outside := check_place(tar, root):
        yield outside
        return
    where = tar.relative_to(root)
    images, captions = _partner(tar, root, CAPTION, IMAGE), _partner(tar, root, IMAGE, CAPTION)
    if images:
        if not images.is_file():
            yield Skip(str(where), f"there is no {images.relative_to(root)} beside it")
        return  # read with its pictures
    samples, faults = _samples(tar, str(where))
    yield from faults
    if captions:
        yield from _add_captions(samples, captions, root)
    for stem, files in samples.items():
        yield from _sample_items(f"{where}/{stem}", stem, files, missing)


def partners(relative: str) -> list[str]:
    """Where the other tar of a pair could be, for a tar's path in the collection."""
    path = Path("/", relative)
    found = (_partner_of(path, Path("/"), *roles) for roles in ((IMAGE, CAPTION), (CAPTION, IMAGE)))
    return [partner.relative_to("/").as_posix() for partner in found if partner]


def _partner(tar: Path, root: Path, role: str, other: str) -> Path | None:
    """The tar of the `other` role, for a tar in a folder named `role` with a place for one."""
    partner = _partner_of(tar, root, role, other)
    if partner is None or role == CAPTION:
        return partner
    place = len(partner.parts) - 1 - partner.parts[::-1].index(other)
    # A lone folder `image` may hold single tars.
    return partner if Path(*partner.parts[:place + 1]).is_dir() else None


def _partner_of(tar: Path, root: Path, role: str, other: str) -> Path | None:
    parts = list(tar.relative_to(root).parts[:-1])
    if role not in parts:
        return None
    place = len(parts) - 1 - parts[::-1].index(role)
    return root.joinpath(*parts[:place], other, *parts[place + 1:], tar.name)


def _add_captions(samples: dict[str, dict[str, Member]], tar: Path, root: Path
                  ) -> Iterator[Skip]:
    where = str(tar.relative_to(root))
    if not tar.is_file():
        yield Skip(where, "it is missing: the pictures of its tar have no captions")
        return
    texts, faults = _samples(tar, where)
    yield from faults
    for stem, files in texts.items():
        if stem in samples:
            samples[stem].update(files)
        else:
            yield Skip(f"{where}/{stem}", "there is no picture to this caption")


def _sample_items(name: str, stem: str, files: Mapping[str, Member], missing: str
                  ) -> Iterator[Item | Skip]:
    pictures = [suffix for suffix in files if suffix in PICTURE_SUFFIXES]
    if not pictures:
        yield Skip(name, "there is no picture to this caption")
        return
    for suffix in pictures[1:]:
        yield Skip(f"{name}{suffix}", f"the sample has a picture already, {stem}{pictures[0]}")
    yield Item(stem, name + pictures[0], files[pictures[0]].read,
               functools.partial(_captions, files, missing))


def _captions(files: Mapping[str, Member], missing: str) -> Named:
    suffix = next((s for s in PARSERS if s in files), None)
    try:
        label = {"label": files[CLASS].read().decode().strip()} if CLASS in files else {}
        texts = parse_sidecar(files[suffix].name, files[suffix].read()) if suffix else {}
    except UnicodeDecodeError as error:
        raise UserError(f"its class {files[CLASS].name} is not UTF-8 text") from error
    except OSError as error:
        raise UserError(f"its caption cannot be read: {error.strerror}") from error
    return check_missing({**texts, **label}, missing)


def _samples(tar: Path, where: str) -> tuple[dict[str, dict[str, Member]], list[Skip]]:
    """Pictures and captions of a tar by sample and ending, in its order, and what was wrong."""
    samples: dict[str, dict[str, Member]] = {}
    faults: list[Skip] = []
    for found in _members(tar, where):
        if isinstance(found, Skip):
            faults.append(found)
            continue
        stem, suffix = _split(found.name)
        if suffix not in PICTURE_SUFFIXES and suffix not in PARSERS and suffix != CLASS:
            continue
        if suffix in samples.setdefault(stem, {}):
            faults.append(Skip(f"{where}/{found.name}", "the tar holds this name twice"))
        else:
            samples[stem][suffix] = found
    return samples, faults


def _split(name: str) -> tuple[str, str]:
    """WebDataset's rule: the sample's name ends at the first dot of the file name."""
    path = PurePosixPath(name)
    stem, dot, suffix = path.name.partition(".")
    return str(path.with_name(stem)) if stem else name, (dot + suffix).lower()


def _members(tar: Path, where: str) -> Iterator[Member | Skip]:
    """The plain files of a tar; a Skip for everything else and where the tar ends too early."""
    length, count = tar.stat().st_size, 0
    try:
        with tarfile.open(tar, "r:") as archive:
            for entry in archive:
                count += 1
                if fault := _fault(entry, length):
                    yield Skip(f"{where}/{entry.name}", fault)
                elif not entry.isdir():
                    yield Member(tar, entry.name, entry.offset_data, entry.size)
            if archive.offset + _BLOCK > length:
                yield Skip(where, f"the tar has no end mark after {count} members: it may be cut")
    except (tarfile.TarError, OSError, ValueError, EOFError) as error:
        yield Skip(where, f"the tar cannot be read after {count} members: {error}")


def _fault(entry: tarfile.TarInfo, length: int) -> str | None:
    parts = PurePosixPath(entry.name).parts
    if entry.name.startswith("/") or ".." in parts or "\0" in entry.name:
        return "its name leaves the folder"
    if entry.isdir():
        return None
    if not entry.isreg() or entry.issparse():
        return "it is no plain file (links in tars are not followed)"
    if entry.offset_data + entry.size > length:
        return "the tar ends in the middle of it"
    return None
