import hashlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from pid_jax import images
from pid_jax.data import geometry
from pid_jax.data.dataset import DatasetWriter
from pid_jax.data.pipeline import build_pipeline
from pid_jax.data.records import Record
from pid_jax.errors import UserError
from tests.data import sets

SIZES = [(40, 30), (30, 40), (64, 48)] * 5
RANDOM = dict(image_size=24, crop="random", resize="random", flip=True, permute_colours=True,
              caption_dropout=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "set"
    sets.dataset(path, SIZES)
    return str(path)


def digest(batch) -> str:
    sha = hashlib.sha256(batch["image"].tobytes())
    sha.update(repr([v.tolist() if isinstance(v, np.ndarray) else v
                     for k, v in sorted(batch.items()) if k != "image"]).encode())
    return sha.hexdigest()


def take(folder, count, batch_size=4, first=0, **options):
    with build_pipeline(folder, batch_size, **options) as batches:
        if first:
            batches.set_state(batches.get_state() | {"step": first})
        return [digest(next(batches)) for _ in range(count)]


def test_a_batch_is_as_documented(folder):
    with build_pipeline(folder, 4, image_size=24) as batches:
        batch = next(batches)
    assert batch["image"].shape == (4, 24, 24, 3) and batch["image"].dtype == np.float32
    assert -1 <= batch["image"].min() < batch["image"].max() <= 1
    for name in ("caption", "key", "source"):
        assert len(batch[name]) == 4 and all(isinstance(v, str) for v in batch[name])
    for row in range(4):
        number = int(batch["record"][row])
        assert batch["key"][row] == f"p{number:03d}"
        assert (batch["width"][row], batch["height"][row]) == SIZES[number]
        assert batch["caption"][row] in sets.record(number).captions.values()


def test_permuted_colours_are_the_same_pictures_in_other_orders(folder):
    with (build_pipeline(folder, 8, image_size=24) as plain,
          build_pipeline(folder, 8, image_size=24, permute_colours=True) as permuted):
        before, after = next(plain)["image"], next(permuted)["image"]
    np.testing.assert_array_equal(np.sort(before, axis=-1), np.sort(after, axis=-1))
    orders = {next(order for order in itertools.permutations(range(3))
                   if np.array_equal(a[..., order], b)) for a, b in zip(before, after)}
    assert len(orders) > 1


def test_pixels_are_pillow_lanczos_normalised(folder):
    with build_pipeline(folder, 4, image_size=24) as batches:
        batch = next(batches)
    number = int(batch["record"][0])
    placed = geometry.cover(SIZES[number], (24, 24))
    expected = np.asarray(placed.apply(sets.picture(*SIZES[number], number)), np.float32)
    np.testing.assert_allclose(batch["image"][0], (expected / 255 - 0.5) / 0.5, atol=1e-7)


def test_drafts_are_nearly_the_same_pictures(tmp_path):
    with DatasetWriter(tmp_path / "set") as writer:
        for number, kind in enumerate(("JPEG", "JPEG", "PNG")):
            data = sets.encoded(sets.picture(900, 620, number), kind)
            writer.add(Record(f"p{number}", "test", 900, 620, {"prompt": "p"}, data))
    options = dict(image_size=128, shuffle=False, crop="random", resize="random")
    with (build_pipeline(str(tmp_path / "set"), 3, **options) as exact,
          build_pipeline(str(tmp_path / "set"), 3, **options, decode="draft") as draft):
        ours, theirs = next(draft)["image"], next(exact)["image"]
    assert np.abs(ours - theirs).mean() < 0.02 and not np.array_equal(ours[:2], theirs[:2])
    np.testing.assert_array_equal(ours[2], theirs[2])


def test_threads_and_workers_change_nothing(folder):
    expected = take(folder, 6, **RANDOM, threads=0)
    assert expected == take(folder, 6, **RANDOM, threads=3)
    assert expected == take(folder, 6, **RANDOM, workers=1)
    assert expected == take(folder, 6, **RANDOM, workers=2, threads=1)


def test_the_seed_changes_everything(folder):
    assert not set(take(folder, 3, **RANDOM)) & set(take(folder, 3, **RANDOM, seed=1))


@pytest.mark.parametrize("first", [1, 3, 7])
def test_resuming_equals_never_stopping(folder, first):
    assert take(folder, 3, first=first, **RANDOM) == take(folder, first + 3, **RANDOM)[first:]


def test_state_follows_the_batches_taken_not_the_prefetched(folder):
    with build_pipeline(folder, 4, **RANDOM) as batches:
        for _ in range(2):
            next(batches)
        state, third = json.loads(json.dumps(batches.get_state())), digest(next(batches))
        assert state["step"] == 2 and batches.step == 3
        batches.set_state(state)
        assert digest(next(batches)) == third


def test_two_processes_see_the_halves_of_the_same_batches(folder):
    streams = [build_pipeline(folder, 4, **RANDOM),
               *(build_pipeline(folder, 4, **RANDOM, process=p, processes=2) for p in (0, 1))]
    for _ in range(5):
        whole, *halves = map(next, streams)
        assert [stream.global_keys for stream in streams] == [whole["key"]] * 3
        np.testing.assert_array_equal(
            whole["image"], np.concatenate([half["image"] for half in halves]))
        assert whole["caption"] == halves[0]["caption"] + halves[1]["caption"]
    for stream in streams:
        stream.close()


def test_an_epoch_holds_every_picture(folder):
    with build_pipeline(folder, 4, image_size=24) as batches:
        seen = [key for _ in range(batches.steps_per_epoch) for key in next(batches)["key"]]
    assert set(seen) == {f"p{i:03d}" for i in range(15)} and len(seen) == 16


def test_repeats_in_a_small_set_are_cropped_anew(tmp_path):
    sets.dataset(tmp_path / "one", [(64, 48)])
    with build_pipeline(str(tmp_path / "one"), 4, image_size=16, crop="random",
                        resize="native") as batches:
        rows = next(batches)["image"]
    assert len({row.tobytes() for row in rows}) > 1


def test_buckets_of_different_shapes(folder):
    with build_pipeline(folder, 2, buckets="custom", sizes=("32x24", "24x32")) as batches:
        shapes = {next(batches)["image"].shape for _ in range(batches.steps_per_epoch)}
        assert {b.name for b in batches.buckets} == {"32x24", "24x32"}
    assert shapes == {(2, 24, 32, 3), (2, 32, 24, 3)}


def test_caption_dropout_and_choice(folder):
    def captions(**options):
        with build_pipeline(folder, 5, image_size=24, **options) as batches:
            return [c for _ in range(12) for c in next(batches)["caption"]]

    assert set(captions(caption_dropout=1.0)) == {""}
    assert all("picture" in c for c in captions(caption_fields=("prompt",)))
    mixed = captions()
    assert 15 < sum("picture" in c for c in mixed) < 45


@pytest.fixture
def damaged(tmp_path):
    sets.dataset(tmp_path / "set", SIZES)
    for key in ("p002", "p007"):
        sets.damage(tmp_path / "set", key)
    return str(tmp_path / "set")


@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": 2}, {"workers": 1}])
def test_damaged_records_are_replaced_counted_and_named(damaged, caplog, options):
    with caplog.at_level(logging.WARNING), build_pipeline(
            damaged, 5, **RANDOM, **options) as batches:
        seen = [key for _ in range(batches.steps_per_epoch) for key in next(batches)["key"]]
        assert len(seen) == 15 and not {"p002", "p007"} & set(seen)
        assert set(batches.skipped) == {"p002", "p007"}
    assert "p002" in caplog.text and "shard-0000" in caplog.text


def test_replacements_are_the_same_every_time(damaged):
    assert take(damaged, 4, 5, **RANDOM) == take(damaged, 4, 5, **RANDOM, threads=0)


@pytest.mark.parametrize("workers", [0, 1])
def test_strict_streams_stop_at_damage(damaged, workers):
    with build_pipeline(damaged, 5, **RANDOM, strict=True, workers=workers) as batches:
        with pytest.raises(UserError, match="damaged"):
            for _ in range(batches.steps_per_epoch):
                next(batches)


def test_nothing_but_damage_is_an_error(tmp_path):
    folder = tmp_path / "set"
    data = sets.dataset(folder, [(40, 30)] * 4)
    for shard in data.manifest["shards"]:
        (folder / shard["file"]).write_bytes(b"")
    with build_pipeline(str(folder), 2, image_size=24) as batches:
        with pytest.raises(UserError, match="in a row.*--verify"):
            next(batches)


@pytest.mark.parametrize("options, message", [
    ({"imagesize": 3}, "did you mean 'image_size'"), ({"crop": "middle"}, "crop is 'middle'"),
    ({"resize": "x"}, "resize is 'x'"), ({"decode": "x"}, "decode is 'x'"),
    ({"caption_dropout": 1.5}, "caption_dropout is 1.5"),
    ({"caption_fields": ("title",)}, "named prompt"), ({"image_size": 4000}, "4000 x 4000"),
    ({"buckets": "round"}, "round"), ({"processes": 3}, "4 cannot be split over 3"),
    ({"processes": 0}, "processes is 0"), ({"workers": -1}, "workers is -1"),
    ({"resize": "adm", "buckets": "custom", "sizes": ("32x24",)}, "squares, .* have 32x24")])
def test_impossible_options(folder, options, message):
    with pytest.raises(UserError, match=message):
        build_pipeline(folder, 4, **({"image_size": 24} | options))


def test_a_batch_larger_than_memory_is_refused_before_it_is_made(folder):
    with pytest.raises(UserError, match="choose a smaller batch_size"):
        build_pipeline(folder, 10**9, image_size=24)


def test_a_state_of_other_data_or_order_is_refused(folder, tmp_path):
    with build_pipeline(folder, 4, image_size=24) as batches:
        state = batches.get_state()
    sets.dataset(tmp_path / "other", SIZES[::-1])
    for stream, message in ((build_pipeline(folder, 2, image_size=24), "batch_size was 4, now 2"),
                            (build_pipeline(str(tmp_path / "other"), 4, image_size=24),
                             "fingerprint")):
        with pytest.raises(UserError, match=message):
            stream.set_state(state)


def test_streams_leave_no_threads(folder):
    before = threading.active_count()
    for _ in range(20):
        with build_pipeline(folder, 4, image_size=24, threads=4) as batches:
            next(batches)
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= before


SCRIPT = """
import sys
from pid_jax.data.dataset import DatasetWriter
from pid_jax.data.pipeline import build_pipeline
from pid_jax.data.records import Record

def main():
    batches = build_pipeline(sys.argv[1], 4, image_size=24, workers=2)
    next(batches)
    import multiprocessing
    print(*(p.pid for p in multiprocessing.active_children()), flush=True)
    if sys.argv[2] == "raise":
        raise RuntimeError("in the loop")
    sys.stdin.read()

if __name__ == "__main__":
    main()
"""


def start_reader(tmp_path, folder, mode):
    script = tmp_path / "reader.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, script, folder, mode], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=os.environ | {"PYTHONPATH": os.getcwd()})
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    return process, workers


def wait_until_gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "worker processes outlive their parent"
        time.sleep(0.05)


def is_running(pid) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("mode", ["raise", "kill"])
def test_workers_end_with_their_program(tmp_path, folder, mode):
    process, workers = start_reader(tmp_path, folder, mode)
    if mode == "kill":
        process.send_signal(signal.SIGKILL)
    assert process.wait(20) != 0
    process.communicate()
    wait_until_gone(workers)


def test_float_rule_is_the_shared_one(folder):
    with build_pipeline(folder, 4, image_size=24) as batches:
        batch = next(batches)["image"]
    np.testing.assert_array_equal(images.to_float(images.to_uint8(batch)), batch)
