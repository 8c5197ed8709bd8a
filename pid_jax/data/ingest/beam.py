"""Packs collections beyond one machine: the transforms of `pid_jax.data.ingest` in Apache Beam.

    python -m pid_jax.data.ingest.beam --src tars --dst packed --shards 400
    python -m pid_jax.data.ingest.beam --src gs://bucket/tars --dst gs://bucket/packed \
        --shards 4000 -- --runner=DataflowRunner --project=P --region=R \
        --temp_location=gs://bucket/tmp --sdk_container_image=IMAGE_WITH_PID_JAX

--src is a folder of WebDataset tars (see `webdataset`), or with `--format list` a table of files
(see `listed`) that every worker can read. Each record goes to a shard by the hash of its key and
stands there in the order of keys, so the data set depends on the collection and --shards alone.
Arguments behind `--` are Beam's. Needs the extra `beam`.
"""

import argparse
import hashlib
import io
import json
import posixpath
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions

from pid_jax.data import command, records
from pid_jax.data import index as index_lib
from pid_jax.data.dataset import MANIFEST, DatasetWriter, index_path, merge_manifests
from pid_jax.data.ingest import folder, listed, webdataset
from pid_jax.data.ingest.pack import SKIPPED, Item, Skip, to_record
from pid_jax.errors import UserError, one_line

FORMATS = ("webdataset", "list")
SKIPS = "skips"
_WHOLE = 1 << 62


class Pack(beam.DoFn):
    """Tars or items -> (shard, (key, record's bytes)); what cannot be packed goes to `SKIPS`."""

    def __init__(self, options: argparse.Namespace):
        self._options = options

    def process(self, task: Any) -> Iterator[Any]:
        with tempfile.TemporaryDirectory() as local:
            for item in self._items(task, Path(local)):
                try:
                    record = to_record(item, self._options.source, self._options.min_side)
                    yield shard_of(record.key, self._options.shards), (
                        record.key, records.to_bytes(record))
                except UserError as error:
                    yield beam.pvalue.TaggedOutput(SKIPS, (_shown(item.name), _shown(str(error))))

    def _items(self, task: Any, local: Path) -> Iterable[Item | Skip]:
        if not isinstance(task, str):
            return [task]
        root = fetch_tar(self._options.src, task, local)
        return webdataset.tar_items(root / task, root, self._options.missing_captions)


def _shown(text: str) -> str:
    """Text that UTF-8 can hold: names of files may hold any bytes."""
    return text.encode("utf-8", "backslashreplace").decode()


def fetch_tar(source: str, relative: str, local: Path) -> Path:
    """A folder with the tar `relative` and its partner: the source, or a copy of what is remote."""
    if "://" not in source:
        return Path(source)
    for name in (relative, *webdataset.partners(relative)):
        path = posixpath.join(source, name)
        if FileSystems.exists(path):
            (local / name).parent.mkdir(parents=True, exist_ok=True)
            with FileSystems.open(path) as remote, open(local / name, "wb") as copy:
                while chunk := remote.read(1 << 24):
                    copy.write(chunk)
    return local


def shard_of(key: str, shards: int) -> int:
    """The shard of a key: a hash, so about as many records are in each."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % shards


def write_shard(group: tuple[int, Iterable[tuple[str, bytes]]], destination: str
                ) -> dict[str, Any]:
    """Writes one shard with its index; a retry writes the same.

    Returns: its number, the manifest of a data set of it alone, its index, duplicates by name.
    """
    number, found = group
    name = f"shard-{number:05d}.arrayrecord"
    duplicates, last = [], None
    with tempfile.TemporaryDirectory() as local:
        with DatasetWriter(Path(local), _WHOLE) as writer:
            for key, data in sorted(found):
                if key == last:
                    duplicates.append(key)
                    continue
                writer.add(records.from_bytes(data))
                last = key
        shard = Path(local) / "shard-00000.arrayrecord"
        index = index_path(shard).read_bytes()
        _publish(shard.read_bytes(), posixpath.join(destination, name))
        _publish(index, posixpath.join(destination, index_path(Path(name)).name))
        manifest = json.loads((Path(local) / MANIFEST).read_text())
    manifest["shards"][0]["file"] = name
    return {"number": number, "manifest": manifest, "index": index, "duplicates": duplicates}


def write_manifest(shards: Sequence[dict[str, Any]], skips: Sequence[tuple[str, str]],
                   destination: str, recipe: dict[str, Any]) -> str:
    """The last step: `skipped.jsonl` and `dataset.json`. Returns a sentence for people."""
    shards = sorted(shards, key=lambda shard: shard["number"])
    if not shards:
        raise UserError(f"none of {len(skips)} items could be packed; the first: "
                        f"{min(skips, default='there is nothing')}")
    reason = "duplicate key: another picture has the same name"
    skips = sorted([*skips, *((key, reason) for s in shards for key in s["duplicates"])])
    manifest = merge_manifests(
        [shard["manifest"] for shard in shards],
        [index_lib.load_index(io.BytesIO(shard["index"])) for shard in shards], len(skips), recipe)
    if skips:
        rows = (json.dumps({"name": name, "reason": why}) for name, why in skips)
        _publish("".join(f"{row}\n" for row in rows).encode(),
                 posixpath.join(destination, SKIPPED))
    _publish(json.dumps(manifest, indent=1).encode(), posixpath.join(destination, MANIFEST))
    return (f"packed {manifest['records']} pictures ({manifest['bytes'] / 1e6:.1f} MB) into "
            f"{destination}, skipped {len(skips)}")


def _publish(data: bytes, path: str) -> None:
    """Writes a file beside `path` and renames it."""
    part = f"{path}.part-{hashlib.sha256(data).hexdigest()[:8]}"
    with FileSystems.create(part) as file:
        file.write(data)
    if FileSystems.exists(path):
        FileSystems.delete([path])
    FileSystems.rename([part], [path])


def tasks(options: argparse.Namespace) -> Iterable[Any]:
    """What workers share: tars by relative path, or the items of a list."""
    if options.format == "list":
        return listed.listed_items(Path(options.src), options.images, options.missing_captions)
    if "://" not in options.src:
        root = Path(options.src)
        return sorted(tar.relative_to(root).as_posix() for tar in root.rglob("*.tar"))
    found = FileSystems.match([posixpath.join(options.src, "**.tar")])[0].metadata_list
    return sorted(posixpath.relpath(entry.path, options.src) for entry in found)


def run(options: argparse.Namespace, beam_arguments: Sequence[str]) -> None:
    """Builds the pipeline and waits for its end. Raises: UserError when nothing is packed."""
    if FileSystems.exists(posixpath.join(options.dst, MANIFEST)):
        raise UserError(f"{options.dst} holds a data set already; name another --dst")
    found = list(tasks(options))
    if not found:
        raise UserError(f"{options.src} holds no .tar files; expected a folder of WebDataset tars")
    if not FileSystems.exists(options.dst):
        FileSystems.mkdirs(options.dst)
    recipe = {"kind": f"beam {options.format}", "source": options.source,
              "min_side": options.min_side, "missing_captions": options.missing_captions}
    with _pipeline(beam_arguments) as pipeline:
        packed = (pipeline | "Tasks" >> beam.Create(found) | "Spread" >> beam.Reshuffle()
                  | "Pack" >> beam.ParDo(Pack(options)).with_outputs(SKIPS, main="records"))
        shards = (packed.records | "Shards" >> beam.GroupByKey()
                  | "Write" >> beam.Map(write_shard, options.dst)
                  | "All" >> beam.combiners.ToList())
        (shards | "Manifest" >> beam.Map(write_manifest, beam.pvalue.AsList(packed[SKIPS]),
                                         options.dst, recipe) | "Say" >> beam.Map(command.show))


def _pipeline(arguments: Sequence[str]) -> beam.Pipeline:
    try:
        return beam.Pipeline(options=PipelineOptions(list(arguments)))
    except ValueError as error:
        reason = one_line(error, 200)
        raise UserError(f"Beam refuses its arguments {' '.join(arguments)}: {reason}") from error


def main(arguments: Sequence[str]) -> None:
    """Parses the command line and packs."""
    ours, beams = list(arguments), []
    if "--" in ours:
        place = ours.index("--")
        ours, beams = ours[:place], ours[place + 1:]
    run(_parse(ours), beams)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command.Parser(prog="python -m pid_jax.data.ingest.beam", description=__doc__)
    parser.add_argument("--src", required=True, help="folder of tars, or a table")
    parser.add_argument("--dst", required=True, help="folder for the data set")
    parser.add_argument("--format", choices=FORMATS, default="webdataset", help="what --src is")
    parser.add_argument("--shards", type=command.count, required=True,
                        help="how many; about 256 MB each is a good size")
    parser.add_argument("--images", type=Path, metavar="DIR", help="folder of a list's pictures")
    parser.add_argument("--source", help="name of the collection (default: the folder's)")
    parser.add_argument("--min-side", type=int, default=1, metavar="PIXELS",
                        help="skip pictures whose shorter side is below this")
    parser.add_argument("--missing-captions", choices=folder.MISSING, default="skip",
                        help="pictures without caption: skip them, or pack them with none")
    options = parser.parse_args(arguments)
    options.source = options.source or posixpath.basename(options.src.rstrip("/"))
    return options


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
