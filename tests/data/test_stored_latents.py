import copy

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from pid_jax import embed_latents, objectives, train
from pid_jax.data import stored_latents
from pid_jax.data.dataset import Dataset, DatasetWriter
from pid_jax.data.pipeline import build_pipeline
from pid_jax.data.records import CorruptRecord
from pid_jax.data.stored_latents import StoredLatents
from pid_jax.diffusion import degrade
from pid_jax.encoders import DctCodec
from pid_jax.errors import UserError
from pid_jax.parallel.mesh import single_device
from tests import tiny
from tests.data import sets

ORIGIN = {"fingerprint": "abc", "codec": "dct"}
LATENT = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run over nine pictures, one of them damaged, one too small for its bucket."""
    folder = tmp_path_factory.mktemp("latents") / "data"
    with DatasetWriter(folder, shard_bytes=3000) as writer:
        for number, size in enumerate([(40, 32)] * 8 + [(8, 8)]):
            writer.add(sets.record(number, *size))
    sets.damage(folder, "p002")
    return tiny.config("pid_teacher", folder)


@pytest.fixture(scope="module")
def latents(config, tmp_path_factory):
    """Made by two processes."""
    folder = tmp_path_factory.mktemp("made") / "latents"
    embed_latents.embed(config, folder, 0, 2, rows=2, batch=2)
    with pytest.raises(UserError, match="no complete latents"):
        StoredLatents(folder)
    embed_latents.embed(config, folder, 1, 2, rows=2, batch=2)
    return folder


def with_latents(config, folder):
    changed = copy.deepcopy(config)
    changed.data.latents = str(folder)
    return changed


@pytest.mark.parametrize("threads, workers", [(0, 0), (2, 0)])
def test_batches_carry_what_the_codec_would_make(config, latents, threads, workers):
    options = {**config.data, "latents": str(latents), "threads": threads, "workers": workers}
    with build_pipeline(**options) as batches:
        for _ in range(batches.steps_per_epoch):
            batch = next(batches)
            small = degrade.downsample(batch["image"], config.model.sr_scale)
            np.testing.assert_allclose(batch["latent"], DctCodec().encode(small), atol=1e-5)
            assert batch["latent"].dtype == np.float32
        assert set(batches.skipped) == {"p002"}


def test_training_reads_them_instead_of_encoding(config, latents):
    changed = with_latents(config, latents)
    objective = objectives.build(changed)
    with train.open_data(changed, objective, single_device()) as batches:
        batch = objective.prepare(next(batches))
    key = jax.random.key(1)
    made = objective.degrade(batch["image"], batch["sigma_range"], key)
    read = objective.degrade(batch["image"], batch["sigma_range"], key, batch["latent"])
    for ours, theirs in zip(read, made):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    objective.codec = None  # nothing is left for it to do
    assert set(objective.examples(batch, key)) >= {"latent", "sigma", "image", "small"}


def test_a_second_run_keeps_whole_files_and_mends_others(config, latents):
    before = {path.name: path.stat().st_mtime_ns for path in latents.glob("*.arrayrecord")}
    assert len(before) == 5
    cut = latents / sorted(before)[1]
    cut.write_bytes(cut.read_bytes()[:-70])
    embed_latents.embed(config, latents, 0, 2, rows=2, batch=2)
    changed = {p.name for p in latents.glob("*.arrayrecord")
               if p.stat().st_mtime_ns != before[p.name]}
    assert changed == {cut.name}
    other = copy.deepcopy(config)
    other.codec.block = 4
    other.model.lq_latent_channels, other.model.latent_spatial_down_factor = 16, 4
    with pytest.raises(UserError, match="of other data or another codec"):
        embed_latents.embed(other, latents, 0, 2, rows=2, batch=2)


@pytest.mark.parametrize("change, words", [
    ({"image_size": 16}, "made for buckets '32x32', this run has '16x16'"),
    ({"resize": "native"}, "made for resize 'fit'"), ({"crop": "random"}, "crop is 'random'"),
    ({"flip": True}, "flip is True"), ({"latents": "nowhere"}, "no complete latents")])
def test_latents_of_other_pictures_are_refused(config, latents, change, words):
    options = {**config.data, "latents": str(latents)} | change
    with pytest.raises(UserError, match=words):
        build_pipeline(**options)


def test_latents_of_another_reduction_or_objective_are_refused(config, latents):
    changed = with_latents(config, latents)
    changed.model.sr_scale = 1
    with pytest.raises(UserError, match="made for scale '2', this run has '1'"):
        train.open_data(changed, objectives.build(changed), single_device())
    other = tiny.config("pixeldit_t2i", config.data.path)
    with pytest.raises(UserError, match="reads no latents"):
        embed_latents.embed(other, latents)


def test_weights_belong_to_what_latents_depend_on():
    config = tiny.config("pid_teacher", "unused")
    config.codec = ConfigDict({"name": "flux", "weights": "random"})
    config.model.lq_latent_channels = 16
    origin = objectives.build(config).latent_origin()
    assert origin["codec"] == "flux" and len(origin["weights"]) == 64


def test_a_full_disk_is_a_sentence(tmp_path):
    (tmp_path / ".a.part").symlink_to("/dev/full")
    with pytest.raises(UserError, match="cannot write .*No space left"):
        stored_latents.write_file(tmp_path / "a", [b"entry"])
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("dtype", stored_latents.DTYPES)
def test_entries_round_trip(dtype):
    data = stored_latents.to_bytes(7, LATENT, dtype, ORIGIN)
    found = stored_latents.from_bytes(data, 7, ORIGIN)
    np.testing.assert_allclose(found, LATENT, rtol=0 if dtype == "float32" else 2**-8)
    assert found.dtype == np.float32


@pytest.mark.parametrize("change, record, words", [
    (lambda d: b"", 7, "does not begin"), (lambda d: d, 8, "another picture's"),
    (lambda d: d[:-1], 7, "checksum"), (lambda d: d[:-1] + b"\0", 7, "checksum"),
    (lambda d: stored_latents.to_bytes(7, None, "float32", ORIGIN), 7, "has no latent"),
    (lambda d: stored_latents.to_bytes(7, LATENT, "float32", {}), 7, "another picture's")])
def test_damaged_entries_say_why(change, record, words):
    data = change(stored_latents.to_bytes(7, LATENT, "float32", ORIGIN))
    with pytest.raises(CorruptRecord, match=words):
        stored_latents.from_bytes(data, record, ORIGIN)


def test_missing_pictures_are_left_out(latents, config):
    stored = StoredLatents(latents)
    number = {record: i for i, record in enumerate(Dataset(config.data.path).index.key[i]
                                                   for i in range(9))}
    for key in ("p002", "p008"):
        with pytest.raises(CorruptRecord, match="has no latent"):
            stored.of_record(number[key])
