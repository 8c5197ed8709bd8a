"""What the decode command writes: places of pictures, when one is complete, sheets, scores."""

import dataclasses
import functools
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import pid_jax
from pid_jax import drawing_command, images
from pid_jax.data import command
from pid_jax.decode_requests import CODEC, LQ, Request, level_name
from pid_jax.evaluation.picture_scores import compare
from pid_jax.files import atomic_write

DRAWN, UNTRAINED, TRUTH, SMALL = "pid", "untrained", "truth", "input"
COLUMNS = (CODEC, LQ, DRAWN, UNTRAINED, TRUTH)  # the order on sheets
TREES = ("names", "reference")
REFERENCE_FOLDERS = {CODEC: "vae_decode", UNTRAINED: "untrained", LQ: "LQ_input", TRUTH: "GT",
                     SMALL: "input"}
OF_A_LEVEL = (CODEC, UNTRAINED)  # columns that differ from noise level to noise level


@dataclasses.dataclass(frozen=True)
class Tree:
    """Where files lie under the output folder.

    Attributes:
      out: the folder.
      kind: "names": NAME/sigma_0.000.png, its other columns beside it; "reference": the PyTorch
        reference's TAG/sigma_0.000/NAME.png, vae_decode/sigma_0.000/NAME.png, LQ_input/NAME.png,
        GT/NAME.png, input/NAME.png.
      tag: says checkpoint and sampler.
    """

    out: Path
    kind: str
    tag: str

    def path(self, column: str, name: str, sigma: float) -> Path:
        """The PNG of a column of a request."""
        level = level_name(sigma)
        if self.kind == "reference":
            folder = self.out / REFERENCE_FOLDERS.get(column, self.tag)
            return (folder / level if column in (DRAWN, *OF_A_LEVEL) else folder) / f"{name}.png"
        if column == DRAWN:
            return self.out / name / f"{level}.png"
        return self.out / name / (f"{level}_{column}.png" if column in OF_A_LEVEL
                                  else f"{column}.png")


@functools.cache
def stamp(folder: Path) -> str:
    """A text that differs when the weights of a checkpoint are written again.

    Its data files have names that are drawn anew at every writing.
    """
    files = sorted((str(path.relative_to(folder)), path.stat().st_size)
                   for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def fingerprint(note: Mapping[str, Any], request: Request, folder: Path) -> str:
    """A text that differs when input, weights (of a step's folder) or any setting does."""
    # What was measured may differ in its last digits from machine to machine.
    note = {name: value for name, value in note.items() if name != "weights_change"}
    given = {"note": note, "content": request.content, "size": list(request.size),
             "stamp": stamp(folder)}
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode(
        "utf-8", "backslashreplace")).hexdigest()


def complete(tree: Tree, request: Request, wanted: str) -> bool:
    """Whether the picture of a request is there, whole, and was made by the same settings."""
    path = tree.path(DRAWN, request.name, request.sigma)
    held = read_note(path)
    try:
        return (held.get("fingerprint") == wanted
                and held.get("sha256") == hashlib.sha256(path.read_bytes()).hexdigest()
                and all((tree.out / place).is_file() for place in held["columns"].values()))
    except (OSError, KeyError, AttributeError, TypeError):
        return False


def read_note(picture: Path) -> dict[str, Any]:
    """The JSON beside a picture; {} when there is none that can be read."""
    try:
        held = json.loads(picture.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def write(tree: Tree, request: Request, columns: Mapping[str, np.ndarray],
          note: Mapping[str, Any], wanted: str) -> Path:
    """Writes the columns [H, W, 3] of a request, then its JSON, then the picture itself.

    So a picture never lacks its JSON, and a run that ends in between is seen to be incomplete.
    """
    pngs = {name: png(picture) for name, picture in columns.items()}
    places = {name: tree.path(name, request.name, request.sigma) for name in columns}
    for name, data in pngs.items():
        if name != DRAWN:
            write_bytes(places[name], data)
    drawing_command.write_json(places[DRAWN].with_suffix(".json"), {
        "picture": places[DRAWN].name, "size": list(columns[DRAWN].shape[:2]),
        "pid_jax": pid_jax.__version__, **note, "scores": scores(columns),
        "columns": {name: str(place.relative_to(tree.out)) for name, place in places.items()},
        "sha256": hashlib.sha256(pngs[DRAWN]).hexdigest(), "fingerprint": wanted}, everywhere=True)
    write_bytes(places[DRAWN], pngs[DRAWN])
    return places[DRAWN]


def png(picture: np.ndarray) -> bytes:
    """Float [H, W, 3] in [-1, 1] as a PNG file; UserError when it is not finite."""
    buffer = io.BytesIO()
    Image.fromarray(images.to_uint8(picture)).save(buffer, "PNG")
    return buffer.getvalue()


def write_bytes(path: Path, data: bytes) -> None:
    """A file that appears complete or not at all."""
    with atomic_write(path, "wb") as file:
        file.write(data)


def scores(columns: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """PSNR (dB), SSIM and CIEDE2000 of every column against the truth; empty without one."""
    if TRUTH not in columns:
        return {}
    truth = columns[TRUTH][None]
    return {name: {metric: round(value, 4)
                   for metric, value in compare(picture[None], truth).items()}
            for name, picture in columns.items() if name not in (TRUTH, SMALL)}


@dataclasses.dataclass(frozen=True)
class Row:
    """One drawn picture as it lies on disk: name, noise level, prompt, size, scores, its files."""

    name: str
    sigma: float
    prompt: str
    size: tuple[int, int]
    scores: Mapping[str, Mapping[str, float]]
    columns: Mapping[str, Path]

    @property
    def title(self) -> str:
        """Name and noise level."""
        return f"{self.name} sigma {self.sigma:.3f}"


def read_row(tree: Tree, name: str, sigma: float) -> Row:
    """The row that `write` left behind."""
    held = read_note(tree.path(DRAWN, name, sigma))
    places = {column: tree.out / held["columns"][column]
              for column in COLUMNS if column in held["columns"]}
    return Row(name, sigma, held["prompt"], tuple(held["size"]), held["scores"], places)


def write_sheets(rows: Sequence[Row], out: Path, note: Mapping[str, Any]) -> None:
    """One sheet per picture size: `grid.png` when all are of one size, else `grid_HxW.png`."""
    by_size: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        by_size.setdefault(row.size, []).append(row)
    for (height, width), group in by_size.items():
        name = "grid.png" if len(by_size) == 1 else f"grid_{height}x{width}.png"
        shared = [column for column in group[0].columns
                  if all(column in row.columns for row in group)]
        shown = group[:drawing_command.GRID_ROWS]
        drawing_command.write_grid(
            out / name, [{column: read_png(row.columns[column]) for column in shared}
                         for row in shown], [row.title for row in shown], note)
        command.show(f"{out / name}: {' | '.join(shared)}")


def read_png(path: Path) -> np.ndarray:
    """float32 [H, W, 3] in [-1, 1]."""
    return images.to_float(np.asarray(images.decode(path.read_bytes())))


def report(rows: Sequence[Row], skipped: Mapping[str, str], out: Path) -> None:
    """Prints the table of scores, writes `metrics.json`, and names what was left out."""
    scored = [(row, row.scores) for row in rows if row.scores]
    if scored:
        means = {f"{sigma:.3f}": mean_scores([s for row, s in scored if row.sigma == sigma])
                 for sigma in sorted({row.sigma for row, _ in scored})}
        for line in table(scored, means):
            command.show(line)
        drawing_command.write_json(out / "metrics.json", {
            "pictures": [{"picture": row.name, "sigma": row.sigma, **s} for row, s in scored],
            "mean_by_sigma": means})
    for name, reason in skipped.items():
        command.show(f"skipped {name}: {reason}")
    command.show(f"{len(rows)} drawn, {len(skipped)} skipped; in {out}")


def mean_scores(found: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Means over pictures of scores by column and metric."""
    shared = [column for column in found[0] if all(column in one for one in found)]
    return {column: {metric: float(np.mean([one[column][metric] for one in found]))
                     for metric in found[0][column]} for column in shared}


def table(scored: Sequence[tuple[Row, Mapping]], means: Mapping[str, Mapping]) -> Iterator[str]:
    """Lines of a table: a picture a row, PSNR and SSIM of every column."""
    columns = [name for name in scored[0][1] if all(name in s for _, s in scored)]
    entries = [(row.title, s) for row, s in scored]
    entries += [(f"mean sigma {sigma}", s) for sigma, s in means.items()]
    width = max(len(name) for name, _ in entries)
    yield " " * width + "".join(f"  {column:>17}" for column in columns)
    yield f"{'PSNR dB / SSIM':<{width}}"
    for name, found in entries:
        yield f"{name:<{width}}" + "".join(
            f"  {found[c]['psnr']:>9.2f} / {found[c]['ssim']:.3f}" for c in columns)
