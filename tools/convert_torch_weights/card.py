"""The model card of converted weights."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

from ml_collections import ConfigDict

import pid_jax
from tools.convert_torch_weights.layout import Layout
from tools.convert_torch_weights.licences import licence_note
from tools.convert_torch_weights.mappings import NETWORKS, Table
from tools.convert_torch_weights.matching import Match
from tools.convert_torch_weights.readers import Source
from tools.convert_torch_weights.recognise import recognise, title, version

CONVERTER_VERSION = 1
FILE_NAME = "model_card.json"


def make_card(config: ConfigDict, table: Table, source: Source, layout: Layout, part: str,
              match: Match) -> dict:
    """Everything that a person or a command should know about converted weights, as JSON values."""
    shapes = table.shapes()
    found, network = recognise(shapes), NETWORKS[config.model.name]
    return {
        "format": 1,
        "pid_jax": pid_jax.__version__,
        "converter": CONVERTER_VERSION,
        "objective": config.objective,
        "model": config.model.name,
        "what": title(found, shapes),
        "version": version(found, shapes),
        "latent_family": config.codec.name if network.families else None,
        "text_encoder": config.text.name,
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "dtype": config.param_dtype,
        "step": 0,
        "averages": [],
        "initialised_from": None,
        "source": _source(source, layout),
        "weights": part,
        "left_out": _left_out(layout, part, match),
        "fresh": list(match.fresh),
        "licence": licence_note(network.licence),
    }


def _source(source: Source, layout: Layout) -> dict:
    return {
        "name": source.path.name,
        "format": source.format,
        "prefixes": dict(layout.prefixes),
        "sha256": {str(file.relative_to(_folder(source))): sha256(file) for file in source.files},
    }


def _folder(source: Source) -> Path:
    return source.path if source.path.is_dir() else source.path.parent


def _left_out(layout: Layout, part: str, match: Match) -> dict:
    """Tensors of the source that were not converted: parts by size, single keys by name."""
    parts: Mapping[str, int] = {name: len(tensors) for name, tensors in layout.parts.items()
                                if name != part}
    return {"parts": dict(parts), "keys": list(match.left_out)}


def sha256(file: Path) -> str:
    """The checksum of a file, as hexadecimal digits."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def read_card(folder: Path) -> dict | None:
    """The card of a converted folder, or None when it has none."""
    try:
        return json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
