import io
import json
from pathlib import Path

import numpy as np
import pytest
import skimage.data
from PIL import Image

from pid_jax import images
from pid_jax.data import buckets, command, geometry, photos
from pid_jax.data.dataset import Dataset
from pid_jax.data.ingest import __main__ as ingest
from pid_jax.data.pipeline import build_pipeline
from tests.data.sets import encoded, tar


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos") / "out"
    assert command.run(photos.main, ["--dst", str(folder)]) == 0
    return {name: Dataset(folder / name) for name in ("train", "heldout")}


def test_no_photograph_is_in_both(packed):
    names = {split: {data.index.key[i].split("/")[0] for i in range(len(data))}
             for split, data in packed.items()}
    assert names["heldout"] == {"astronaut", "chelsea", "ihc"}
    assert len(names["train"]) == 12 and not names["train"] & names["heldout"]


def test_tiles_are_regions_of_the_photograph(packed):
    data = packed["train"]
    keys = [data.index.key[i] for i in range(len(data))]
    record = data[keys.index("coffee/x0172_y0144")]
    np.testing.assert_array_equal(images.decode(record.image),
                                  skimage.data.coffee()[144:400, 172:428])
    assert record.captions["prompt_short"] == "a cup of coffee"


def test_heldout_photographs_are_the_files_as_shipped(packed):
    np.testing.assert_array_equal(images.decode(packed["heldout"][0].image),
                                  skimage.data.astronaut())


def test_every_record_has_three_captions(packed):
    for data in packed.values():
        assert set(data.manifest["captions"].values()) == {len(data)}
        assert data.index.caption_length.min() > 10


def test_tiles_cover_the_photograph():
    for length in (256, 257, 300, 512, 741):
        corners = photos.tile_corners(length, 256)
        assert corners[0] == 0 and corners[-1] == length - 256
        assert all(b - a <= 192 for a, b in zip(corners, corners[1:]))
    assert len(photos.tile_corners(5000, 256)) == photos.MOST_TILES


def test_existing_folders_and_bad_tiles(packed, tmp_path, capsys):
    folder = str(packed["train"].folder.parent)
    assert command.run(photos.main, ["--dst", folder]) == 2
    assert command.run(photos.main, ["--dst", str(tmp_path / "x"), "--tile", "3"]) == 2
    assert "16 to 4096" in capsys.readouterr().err
    assert len(Dataset(packed["train"].folder)) == len(packed["train"])


def test_without_scikit_image(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(photos.importlib.util, "find_spec", lambda name: None)
    assert command.run(photos.main, ["--dst", str(tmp_path / "x")]) == 2
    assert "scikit-image" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_real_photographs_go_through_the_whole_path(tmp_path):
    """The reference's tars of JPEGs, packed, read in buckets: pixels are Pillow's Lanczos."""
    originals = {}
    for name in ("coffee", "motorcycle_left", "rocket", "retina"):
        file = next(Path(skimage.data.__file__).parent.glob(f"{name}.*"))
        originals[name] = encoded(images.decode(file.read_bytes()), "JPEG", quality=92)
    folder = tmp_path / "tars" / "aspect_ratio_3_2"
    tar(folder / "image/part_000000/000000.tar", {f"{n}.jpg": d for n, d in originals.items()})
    tar(folder / "caption/part_000000/000000.tar",
        {f"{n}.json": json.dumps({"prompt": n}).encode() for n in originals})
    assert command.run(ingest.main, ["--format", "webdataset", "--src", str(tmp_path / "tars"),
                                     "--dst", str(tmp_path / "packed")]) == 0
    sizes = ("384x256", "256x256")
    layout = buckets.build_layout("custom", 0, sizes)
    seen = set()
    with build_pipeline(str(tmp_path / "packed"), 1, buckets="custom", sizes=sizes) as batches:
        for _ in range(batches.steps_per_epoch):
            batch = next(batches)
            name, = batch["caption"]
            photo = Image.open(io.BytesIO(originals[name])).convert("RGB")
            placed = geometry.cover(photo.size, buckets.assign(layout, photo.size).size, 0.9)
            x, y = placed.corner
            expected = photo.resize(placed.resized, Image.Resampling.LANCZOS).crop(
                (x, y, x + placed.target[0], y + placed.target[1]))
            np.testing.assert_array_equal(images.to_uint8(batch["image"][0]), expected)
            seen.add(name)
    assert seen == set(originals)
