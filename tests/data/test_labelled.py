import io

import numpy as np
import pytest
from PIL import Image

from pid_jax.data.dataset import Dataset
from pid_jax.data.geometry import adm_crop
from pid_jax.data.ingest import __main__ as ingest
from pid_jax.data.ingest import labelled
from pid_jax.errors import UserError
from tests.data.sets import encoded, picture


def write(path, width=40, height=30):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((height, width, 3), 90, np.uint8)).save(path)


def test_folders_become_labels_and_squares(tmp_path):
    for name in ("n02/b.png", "n02/deep/c.png", "n01/a.png"):
        write(tmp_path / "src" / name)
    write(tmp_path / "src" / "stray.png")
    ingest.main(["--src", str(tmp_path / "src"), "--dst", str(tmp_path / "packed"), "--labels",
                 "folders", "--center-crop", "16"])
    records = {record.key: record for record in Dataset(tmp_path / "packed")}
    assert {key: record.captions["label"] for key, record in records.items()} == {
        "n01/a": "0", "n02/b": "1", "n02/deep/c": "1"}
    assert {(record.width, record.height) for record in records.values()} == {(16, 16)}


def test_a_class_more_does_not_renumber_what_is_packed(tmp_path):
    flags = ["--src", str(tmp_path / "src"), "--dst", str(tmp_path / "packed"), "--labels",
             "folders"]
    write(tmp_path / "src" / "b" / "0.png")
    ingest.main(flags)
    write(tmp_path / "src" / "b" / "1.png")
    ingest.main(flags)
    write(tmp_path / "src" / "a" / "0.png")
    with pytest.raises(UserError, match="packed otherwise"):
        ingest.main(flags)
    labels = [record.captions["label"] for record in Dataset(tmp_path / "packed")]
    assert labels == ["0", "0"]
    with pytest.raises(UserError, match="leave out --tfds and --format"):
        ingest.main([*flags, "--format", "webdataset"])


def test_small_pictures_are_left_out_before_the_crop(tmp_path):
    write(tmp_path / "src" / "n" / "small.png", 40, 15)
    write(tmp_path / "src" / "n" / "large.png", 40, 20)
    write(tmp_path / "src" / "n" / "line.png", 20_000, 1)
    for least, words in (("20", "smaller than --min-side 20"), ("1", "too long and thin")):
        out = tmp_path / least
        ingest.main(["--src", str(tmp_path / "src"), "--dst", str(out), "--labels", "folders",
                     "--center-crop", "256", "--min-side", least])
        assert words in (out / "skipped.jsonl").read_text()
        assert [record.key for record in Dataset(out)] == ["n/large", "n/small"][:3 - len(least)]


def test_a_source_without_folders_is_refused(tmp_path):
    write(tmp_path / "a.png")
    with pytest.raises(UserError, match="one for each class"):
        labelled.class_folders(tmp_path)
    with pytest.raises(UserError, match="--src is missing"):
        ingest.main(["--dst", str(tmp_path / "packed")])


class Rows(list):
    """A data source with damage where there is no row."""

    def __getitem__(self, number):
        row = super().__getitem__(number)
        if row is None:
            raise RuntimeError("chunk header hash mismatch")
        return row


def test_pictures_of_a_tfds_set(tmp_path, monkeypatch):
    write(tmp_path / "one.png")
    data = (tmp_path / "one.png").read_bytes()
    rows = Rows([{"image": data, "label": np.int64(7)}, {"image": data, "label": np.int64(0)}, None])
    monkeypatch.setattr(labelled, "_tfds_source", lambda *arguments: rows)
    ingest.main(["--tfds", "imagenet2012", "--dst", str(tmp_path / "packed")])
    packed = list(Dataset(tmp_path / "packed"))
    assert [record.captions for record in packed] == [{"label": "7"}, {"label": "0"}]
    assert packed[0].source == "imagenet2012" and packed[0].image == data
    assert "TFDS cannot read it: chunk header" in (tmp_path / "packed" / "skipped.jsonl").read_text()


def test_a_tfds_set_that_is_not_prepared(tmp_path):
    with pytest.raises(UserError, match="tfds build"):
        next(labelled.tfds_items("no_such_set", "train", tmp_path))


@pytest.mark.parametrize("native", [(40, 30), (300, 200), (9, 31), (16, 16)])
def test_centre_crop_has_its_size(native):
    assert adm_crop(Image.new("RGB", native), 16).size == (16, 16)


def test_a_real_tfds_set(tmp_path):
    """Prepared by TFDS itself, which needs no TensorFlow for array_record files."""
    import tensorflow_datasets as tfds

    class Ramps(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        pkg_dir_path, url_infos = None, {}  # this file is no TFDS package

        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
                "image": tfds.features.Image(shape=(None, None, 3), encoding_format="png"),
                "label": tfds.features.ClassLabel(num_classes=3)}))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i in range(4):
                yield i, {"image": io.BytesIO(encoded(picture(30, 20 + i))), "label": i % 3}

    Ramps(data_dir=str(tmp_path / "tfds"), file_format="array_record").download_and_prepare()
    ingest.main(["--tfds", "ramps", "--src", str(tmp_path / "tfds"), "--dst",
                 str(tmp_path / "packed")])
    found = {record.height: record for record in Dataset(tmp_path / "packed")}
    assert {h: r.captions["label"] for h, r in found.items()} == {
        20: "0", 21: "1", 22: "2", 23: "0"}
    assert found[21].image == encoded(picture(30, 21))
