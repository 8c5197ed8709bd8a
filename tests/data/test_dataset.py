import concurrent.futures
import copy
import json

import numpy as np
import pytest

from pid_jax.data import index as index_lib
from pid_jax.data.dataset import Dataset, DatasetWriter, index_path, merge_manifests
from pid_jax.data.destination import check_destination, staged_folder
from pid_jax.data.inspect import faults
from pid_jax.data.records import CorruptRecord
from pid_jax.errors import UserError
from tests.data import sets

SIZES = [(40, 30), (30, 40), (64, 64)] * 6


@pytest.fixture
def packed(tmp_path):
    return sets.dataset(tmp_path / "set", SIZES)


def test_round_trip_over_several_shards(packed):
    assert len(packed.manifest["shards"]) > 2 and packed.manifest["complete"]
    assert [packed[i] for i in range(len(packed))] == [
        sets.record(i, *size) for i, size in enumerate(SIZES)]
    assert packed.manifest["sources"] == {"test": 18}
    assert packed.manifest["captions"] == {"prompt": 18, "prompt_short": 18}


def test_index_knows_every_record(packed):
    index = packed.index
    assert [index.key[i] for i in range(len(index))] == [f"p{i:03d}" for i in range(18)]
    assert list(zip(index.width, index.height)) == SIZES
    assert set(index.caption_length) == {len("picture number 0"), len("picture number 10")}
    assert index.source[17] == "test"


def test_captions_are_read_without_pictures(packed):
    expected = [sets.record(i).captions for i in range(18)]
    for shard in packed.shards.files[1:]:
        shard.write_bytes(b"")
    assert list(packed.captions()) == expected


def test_captions_of_an_earlier_index_come_from_the_records(packed, monkeypatch):
    sets.damage(packed.folder, "p003")
    monkeypatch.setattr(index_lib, "load_captions", lambda path: None)
    found = list(packed.captions())
    assert found[3] == {} and found[4] == sets.record(4).captions and len(found) == 18


def test_records_are_alone_in_their_groups(packed):
    shard = packed.shards.reader(0)
    assert "group_size:1," in shard.writer_options_string()


def test_fingerprint_follows_contents_and_order(tmp_path, packed):
    again = sets.dataset(tmp_path / "again", SIZES)
    other = sets.dataset(tmp_path / "other", SIZES[::-1])
    assert packed.fingerprint == again.fingerprint != other.fingerprint


def test_indices_outside_are_refused(packed):
    for i in (-1, 18):
        with pytest.raises(IndexError):
            packed[i]


def test_many_threads_and_copies_read_the_same(packed):
    twin = copy.deepcopy(packed)
    order = np.random.default_rng(0).integers(0, 18, 300).tolist()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda i: twin[i].key, order))
    assert keys == [f"p{i:03d}" for i in order]


def test_readers_stay_few(packed, monkeypatch):
    monkeypatch.setattr("pid_jax.data.shard_files.OPEN_READERS", 2)
    assert [packed[i].key for i in (0, 17, 9, 0)] == ["p000", "p017", "p009", "p000"]
    assert len(packed.shards._readers) <= 2


def test_duplicate_keys_are_refused(tmp_path):
    with DatasetWriter(tmp_path / "set") as writer:
        writer.add(sets.record(1))
        assert "p001" in writer
        with pytest.raises(UserError, match="duplicate"):
            writer.add(sets.record(1))


def test_an_interrupted_writer_leaves_a_readable_set(tmp_path):
    folder = tmp_path / "set"
    with pytest.raises(KeyboardInterrupt), DatasetWriter(folder) as writer:
        writer.add(sets.record(0))
        raise KeyboardInterrupt
    data = Dataset(folder)
    assert data[0] == sets.record(0) and not data.manifest["complete"]


def test_a_killed_writer_leaves_its_finished_shards(tmp_path):
    writer = DatasetWriter(tmp_path, shard_bytes=1)
    writer.add(sets.record(0))
    writer._shard_bytes = 1 << 20
    writer.add(sets.record(1))  # its shard is never finished
    assert len(Dataset(tmp_path)) == 1


def test_a_damaged_record_is_named_and_others_are_read(packed):
    sets.damage(packed.folder, "p004")
    data = Dataset(packed.folder)
    with pytest.raises(CorruptRecord, match="shard-0000.*p004"):
        data[4]
    assert data[3] == sets.record(3, *SIZES[3]) and data[5] == sets.record(5, *SIZES[5])


def test_a_truncated_shard_is_damage_of_its_records_only(packed):
    shard = packed.folder / packed.manifest["shards"][0]["file"]
    shard.write_bytes(shard.read_bytes()[:1000])
    data = Dataset(packed.folder)
    with pytest.raises(CorruptRecord, match="shard-00000"):
        data[0]
    assert data[17].key == "p017"


def test_a_record_that_is_not_the_indexed_one_is_noticed(packed):
    files = [packed.folder / s["file"] for s in packed.manifest["shards"]]
    files[0].write_bytes(files[1].read_bytes())
    with pytest.raises(CorruptRecord, match="index"):
        Dataset(packed.folder)[0]


def edit_manifest(data, **changes):
    path = data.folder / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("changes, message", [
    ({"schema": 7}, "schema 7"), ({"format": "x"}, "'x'"), ({"shards": []}, "no pictures"),
    ({"shards": [{"file": "../set/shard-00000.arrayrecord", "records": 1}]}, "names the shard"),
    ({"shards": [{"file": "shard-00099.arrayrecord", "records": 1}]}, "shard-00099"),
    ({"shards": [{"file": "shard-00000.arrayrecord", "records": 99}]}, "99"),
    ({"shards": 3}, "damaged"), ({"shards": [{}]}, "damaged"), ({"complete": None}, "damaged"),
    ({"captions": [1]}, "damaged.*captions is a list"), ({"bytes": "x"}, "damaged")])
def test_bad_manifests(packed, changes, message):
    edit_manifest(packed, **changes)
    with pytest.raises(UserError, match=message):
        Dataset(packed.folder)


def test_missing_and_damaged_files(tmp_path, packed):
    with pytest.raises(UserError, match="does not exist.*ingest"):
        Dataset(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no dataset.json"):
        Dataset(tmp_path)
    index = index_path(packed.folder / packed.manifest["shards"][0]["file"])
    index.write_bytes(index.read_bytes()[:50])
    with pytest.raises(UserError, match="index .* is damaged"):
        Dataset(packed.folder)
    index.unlink()
    with pytest.raises(UserError, match="index .* is missing"):
        Dataset(packed.folder)
    (packed.folder / "dataset.json").write_text("{")
    with pytest.raises(UserError, match="dataset.json is damaged"):
        Dataset(packed.folder)


def test_pickled_objects_in_an_index_are_refused(packed):
    path = index_path(packed.folder / "shard-00000.arrayrecord")
    np.savez(path, key=np.array([{}], dtype=object))
    with pytest.raises(UserError, match="damaged"):
        index_lib.load_index(path)


@pytest.mark.parametrize("name, change, message", [
    ("width", lambda a: a * 0, "without pixels"),
    ("height", lambda a: a.astype(float), "whole numbers"),
    ("checksum", lambda a: a[:, None], "whole numbers"),
    ("size", lambda a: a[:-1], "different lengths"),
    ("key_ends", lambda a: a + 10**6, "key is no text"),
    ("key_ends", lambda a: a[::-1], "key is no text"),
    ("source", lambda a: a | 0x80, "source is no text")])
def test_columns_that_no_index_has(packed, name, change, message):
    path = index_path(packed.folder / "shard-00000.arrayrecord")
    columns = dict(np.load(path))
    np.savez(path, **columns | {name: change(columns[name])})
    with pytest.raises(UserError, match=f"damaged: .*{message}"):
        index_lib.load_index(path)


def test_cuts_within_a_character_are_no_text():
    texts = index_lib.Texts.of(["ü", "猫"])
    assert texts.is_whole()
    assert not index_lib.Texts(texts.blob, texts.ends - [1, 0]).is_whole()
    assert index_lib.Texts.of([]).is_whole()


def test_destinations(tmp_path, packed):
    check_destination(tmp_path / "new", overwrite=False)
    with pytest.raises(UserError, match="--overwrite"):
        check_destination(packed.folder, overwrite=False)
    check_destination(packed.folder, overwrite=True)
    (packed.folder / "thesis.doc").write_text("mine")
    with pytest.raises(UserError, match="thesis.doc"):
        check_destination(packed.folder, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        check_destination(tmp_path / "file", overwrite=True)


def test_a_replaced_set_stays_until_the_new_one_is_complete(tmp_path, packed):
    with pytest.raises(ZeroDivisionError), staged_folder(packed.folder, overwrite=True) as stage:
        sets.dataset(stage, SIZES[:1])
        1 / 0
    assert len(Dataset(packed.folder)) == 18
    with staged_folder(packed.folder, overwrite=True) as stage:
        sets.dataset(stage, SIZES[:1])
    assert len(Dataset(packed.folder)) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_a_disk_that_cannot_be_written(tmp_path):
    writer = DatasetWriter(tmp_path / "set")
    (tmp_path / "set").rmdir()
    with pytest.raises(UserError, match="cannot write"):
        writer.add(sets.record(0))
        writer._finish_shard()


def test_data_sets_merge_to_one(tmp_path, packed):
    """As the Beam pipeline does: the shards of several data sets under one manifest."""
    whole, parts, indices = tmp_path / "whole", [], []
    whole.mkdir()
    for number, size in enumerate(SIZES[:3]):
        with DatasetWriter(tmp_path / str(number)) as writer:
            writer.add(sets.record(number, *size))
        part = Dataset(tmp_path / str(number))
        shard = f"shard-{number:05d}.arrayrecord"
        part.shards.files[0].rename(whole / shard)
        index_path(part.shards.files[0]).rename(index_path(whole / shard))
        part.manifest["shards"][0]["file"] = shard
        parts.append(part.manifest)
        indices.append(part.index)
    manifest = merge_manifests(parts, indices, 4, {"kind": "test"})
    (whole / "dataset.json").write_text(json.dumps(manifest))
    merged = Dataset(whole)
    assert [merged[i] for i in range(3)] == [sets.record(i, *SIZES[i]) for i in range(3)]
    assert merged.fingerprint == sets.dataset(tmp_path / "same", SIZES[:3]).fingerprint
    assert (merged.manifest["skipped"], merged.manifest["sources"]) == (4, {"test": 3})
    assert not list(faults(merged))
