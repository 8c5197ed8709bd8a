"""Readers of weight files: one interface, no torch, nothing in a file is ever run."""

from pathlib import Path

from pid_jax.errors import UserError
from tools.convert_torch_weights.readers.distributed import open_distributed
from tools.convert_torch_weights.readers.safetensors_file import open_safetensors
from tools.convert_torch_weights.readers.sharded import open_sharded
from tools.convert_torch_weights.readers.tensors import (
    LazyTensor, Source, Unreadable, is_plain_name)
from tools.convert_torch_weights.readers.torch_file import open_torch_file

__all__ = ["LazyTensor", "Source", "Unreadable", "open_source"]

MAX_NAME = 500
MAX_SHARING = 16
_TORCH_ENDINGS = (".pth", ".pt", ".bin", ".ckpt", ".pkl")


def open_source(path: str | Path) -> Source:
    """Opens a weight file or folder of any kind that is listed in docs/convert.md.

    Tensors are not read: sizes and places are checked, numbers come with `LazyTensor.read`.

    Raises:
      UserError: nothing there.
      Unreadable: not a weight file, damaged, or asking to run something.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"there is no file or folder {path}")
    source = _open_folder(path) if path.is_dir() else _open_file(path)
    _check_claims(source)
    return source


def _check_claims(source: Source) -> None:
    """Names fit for messages, and no more numbers than files of this size have a use for.

    Tensors may share their numbers (an average that equals the network, a repeated row), so a small
    file can describe an enormous model.
    """
    for name in source.tensors:
        if not name.isprintable() or len(name) > MAX_NAME:
            raise Unreadable(source.path, "a tensor's name is not printable or too long", name)
    stored = sum(file.stat().st_size for file in source.files)
    claimed = sum(tensor.nbytes for tensor in source.tensors.values())
    if claimed > MAX_SHARING * stored + (1 << 20):
        raise Unreadable(source.path, f"its tensors would take {claimed:,} bytes, more than "
                         f"{MAX_SHARING} times the {stored:,} bytes that are stored")


def _open_file(path: Path) -> Source:
    if not path.is_file():
        raise Unreadable(path, "it is no regular file")
    if path.name.endswith(".index.json"):
        return open_sharded(path)
    if path.suffix == ".safetensors":
        return open_safetensors(path)
    if path.suffix in _TORCH_ENDINGS:
        return open_torch_file(path)
    raise Unreadable(path, f"the ending {path.suffix!r} is unknown; known are .safetensors, "
                     f"{', '.join(_TORCH_ENDINGS)}, .index.json and folders")


def _open_folder(folder: Path) -> Source:
    for candidate in (folder, folder / "model", *_latest(folder)):
        if (candidate / ".metadata").is_file():
            return open_distributed(candidate)
    indices = sorted(folder.glob("*.index.json"))
    files = indices or [p for p in sorted(folder.iterdir())
                        if p.suffix in (".safetensors", *_TORCH_ENDINGS)]
    if len(files) == 1:
        return _open_file(files[0])
    names = ", ".join(p.name for p in files) or "none"
    raise Unreadable(folder, "it is no distributed checkpoint (no .metadata) and holds not exactly "
                     f"one weight file (found: {names}); name the file")


def _latest(folder: Path) -> list[Path]:
    """Folders of the iteration that `latest_checkpoint.txt` names."""
    note = folder / "latest_checkpoint.txt"
    if not note.is_file():
        return []
    with open(note, encoding="utf-8", errors="replace") as file:
        name = file.read(1000).strip()
    return [folder / name / "model", folder / name] if is_plain_name(name) else []
