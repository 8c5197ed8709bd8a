import collections
import json
import logging
import types

import numpy as np
import pytest

from pid_jax import embed_captions
from pid_jax.data.buckets import Fewer, build_layout
from pid_jax.data.pipeline import build_pipeline
from pid_jax.data.plan import Plan, Shares, process_rows
from pid_jax.data.sources import Mixture, open_data, read_registry
from pid_jax.diffusion.noising import LatentNoiser
from pid_jax.errors import UserError
from pid_jax.objectives.pid_teacher import PidTeacher
from tests import tiny
from tests.data import sets
from tests.data.test_plan import TWO, epoch_of, index_of
from tests.data.test_pipeline import RANDOM, digest

SIZES = {"many": [(40, 30), (30, 40)] * 8, "few": [(40, 30)] * 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for name, sizes in SIZES.items():
        sets.dataset(folder / name, sizes)
    return folder


def write(folder, name="sources.json", **options) -> str:
    entries = {source: {"path": source, **options.get(source, {})} for source in SIZES}
    (folder / name).write_text(json.dumps(entries))
    return str(folder / name)


def test_without_weights_an_epoch_is_every_picture_once(folder):
    with build_pipeline(write(folder), 1, image_size=24) as batches:
        assert batches.steps_per_epoch == 19
        seen = [batch for _, batch in zip(range(19), batches)]
    assert sorted(int(batch["record"][0]) for batch in seen) == list(range(19))
    assert collections.Counter(batch["source"][0] for batch in seen) == {"many": 16, "few": 3}


@pytest.mark.parametrize("weights, expected", [((1, 1), (10, 10)), ((3, 1), (14, 5)),
                                               ((0.01, 1), (1, 19))])
def test_weights_are_shares_of_the_samples(folder, weights, expected):
    path = write(folder, many={"weight": weights[0]}, few={"weight": weights[1]})
    with build_pipeline(path, 1, image_size=24) as batches:
        for _ in range(3):
            seen = [next(batches)["source"][0] for _ in range(batches.steps_per_epoch)]
            assert (seen.count("many"), seen.count("few")) == expected


def mixed_plan(**options) -> Plan:
    sizes = [(100, 100)] * 40 + [(150, 100)] * 20 + [(100, 100)] * 7 + [(10, 10)] * 2
    source = np.array([0] * 60 + [1] * 9)
    return Plan(index_of(sizes), TWO, 4, shares=Shares(source, (1.0, 1.0)), **options)


def test_every_picture_of_a_source_comes_before_one_comes_again():
    plan = mixed_plan(remainder="drop")
    counts = collections.Counter()
    steps = []
    for number in range(12):
        slots = [slot for batch in epoch_of(plan, number) for slot in batch]
        steps.append(len(slots) // 4)
        assert len({(s.record, s.turn) for s in slots}) == len(slots)
        counts.update(s.record for s in slots)
    assert set(steps) == {plan.steps_per_epoch}
    few = [counts[i] for i in range(60, 67)]
    many = [counts[i] for i in range(40)]
    # 33 or 34 of an epoch from the 7 of one source; a batch that was not filled leaves some out.
    assert max(few) - min(few) <= 6 and max(many) - min(many) <= 3
    assert 0.4 < sum(few) / sum(counts.values()) < 0.6 and not counts[67]


def test_batches_of_a_mixture_have_one_bucket_and_are_random_access():
    plan, same = mixed_plan(seed=3), mixed_plan(seed=3)
    backwards = [same.batch(step) for step in reversed(range(40))][::-1]
    assert [plan.batch(step) for step in range(40)] == backwards
    assert all(len({slot.bucket for slot in batch}) == 1 for batch in backwards)
    for processes in (1, 2, 4):
        for step in (0, 17, 39):
            parts = [plan.batch(step, process_rows(4, p, processes)) for p in range(processes)]
            assert sum(parts, []) == backwards[step]


def test_resuming_on_other_hosts_goes_on_with_the_global_order(folder):
    path = write(folder, many={"weight": 1}, few={"weight": 2})
    with build_pipeline(path, 4, **RANDOM) as batches:
        whole = [next(batches) for _ in range(12)]

    def read(first, last, processes, state):
        """Steps first to last on so many hosts, each continued from `state`."""
        streams = [build_pipeline(path, 4, **RANDOM, process=p, processes=processes)
                   for p in range(processes)]
        for stream in streams:
            stream.set_state(state or stream.get_state())
        for step in range(first, last):
            images = np.concatenate([next(stream)["image"] for stream in streams])
            np.testing.assert_array_equal(images, whole[step]["image"])
        states = [json.loads(json.dumps(stream.get_state())) for stream in streams]
        assert all(state == states[0] for state in states)
        for stream in streams:
            stream.close()
        return states[0]

    state = read(0, 5, 2, None)
    for processes in (1, 4):
        read(5, 12, processes, state)


def test_changed_weights_are_another_order(folder):
    with build_pipeline(write(folder, many={"weight": 1}, few={"weight": 2}), 4,
                        image_size=24) as batches:
        state = batches.get_state()
    for weights, now in (((1, 3), "'1.0,3.0'"), ((None, None), "None")):
        options = [{} if weight is None else {"weight": weight} for weight in weights]
        other = write(folder, many=options[0], few=options[1])
        with build_pipeline(other, 4, image_size=24) as batches:
            with pytest.raises(UserError, match=f"weights was '1.0,2.0', now {now}"):
                batches.set_state(state)


def test_sources_have_captions_and_noise_of_their_own(folder):
    path = write(folder, many={"caption_fields": ["prompt_short"]},
                 few={"sigma_range": [0.25, 0.5], "caption_fields": ["prompt"]})
    with build_pipeline(path, 19, image_size=24) as batches:
        batch = next(batches)
    for source, caption, sigma in zip(batch["source"], batch["caption"], batch["sigma_range"]):
        assert caption.startswith("picture" if source == "few" else "number")
        assert sigma.tolist() == [0.25, 0.5] if source == "few" else np.isnan(sigma).all()
    teacher = types.SimpleNamespace(noiser=LatentNoiser(sigma_max=0.8),
                                    prompts=lambda captions: np.zeros((len(captions), 1, 1)))
    ranges = PidTeacher.prepare(teacher, batch)["sigma_range"]
    expected = [(0.25, 0.5) if s == "few" else (0.0, 0.8) for s in batch["source"]]
    np.testing.assert_array_equal(ranges, np.array(expected, np.float32))


def test_some_sources_of_a_registry(folder):
    path = write(folder)
    assert len(open_data(path)) == 19 and len(open_data(path, ("few",))) == 3
    assert open_data(path).fingerprint != open_data(path, ("many",)).fingerprint
    with build_pipeline(path, 1, image_size=24, sources=("few",)) as batches:
        assert batches.steps_per_epoch == 3


def test_captions_of_a_registry_are_embedded(folder):
    config = tiny.config("pixeldit_t2i", write(folder, many={"caption_fields": ["prompt_short"]}))
    config.data.caption_fields = ("prompt",)
    found = embed_captions.captions_of(config)
    assert {"number 3", "picture number 2", "picture number 9"} <= found


def test_damage_in_a_source_is_replaced(tmp_path, caplog):
    for name, sizes in SIZES.items():
        sets.dataset(tmp_path / name, sizes)
    sets.damage(tmp_path / "few", "p001")
    path = write(tmp_path)
    with caplog.at_level(logging.WARNING), build_pipeline(path, 19, image_size=24) as batches:
        next(batches)
        assert set(batches.skipped) == {"p001"}


@pytest.mark.parametrize("content, words", [
    ("{", "is not JSON"), ("[]", "must be a JSON object"), ("{}", "must be a JSON object"),
    ('{"a": 3}', "expected an object with a path"), ('{"a": {}}', "expected an object with a path"),
    ('{"a": {"path": "x", "wieght": 1}}', "did you mean 'weight'"),
    ('{"a": {"path": "x", "format": "tar"}}', "pid_jax.data.ingest"),
    ('{"a": {"path": "x", "weight": 0}}', "weight .* is 0"),
    ('{"a": {"path": "x", "weight": true}}', "weight .* is True"),
    ('{"a": {"path": "x", "weight": 1}, "b": {"path": "x"}}', "to all or to none"),
    ('{"a": {"path": "x", "caption_fields": []}}', "a list of names"),
    ('{"a": {"path": "x", "sigma_range": [0.5, 0.2]}}', "lowest <= highest"),
    ('{"a": {"path": "x"}}', "unknown source .* 'b'")])
def test_mistaken_registries(tmp_path, content, words):
    (tmp_path / "r.json").write_text(content)
    names = ("b",) if "unknown" in words else ()
    with pytest.raises(UserError, match=words):
        read_registry(tmp_path / "r.json", names)


def test_other_mistakes(tmp_path, folder):
    with pytest.raises(UserError, match="cannot be read"):
        open_data(tmp_path / "none.json")
    with pytest.raises(UserError, match="is no registry"):
        open_data(folder / "few", ("few",))
    path = write(folder, few={"caption_fields": ["title"]})
    with pytest.raises(UserError, match="are named prompt"):
        build_pipeline(path, 1, image_size=24)
    with pytest.raises(IndexError):
        open_data(path)[19]


def test_compiled_shapes_are_bounded(folder):
    layout = build_layout("multi", 4096)
    natives = [(4200, 4200)] * 5 + [(2100, 2100)] * 3 + [(4200, 2400)] * 2 + [(2300, 3100)]
    fewer = Fewer(layout, natives, 2)
    assert len(layout.buckets) > 30 and [b.size for b in fewer.buckets] == [(4096, 4096),
                                                                         (2048, 2048)]
    assert fewer.candidate((9000, 5000)).size == (4096, 4096)
    assert fewer.candidate((4000, 2200)).size == (2048, 2048)
    sizes = ("32x24", "24x32", "16x16")
    with build_pipeline(write(folder), 4, buckets="custom", sizes=sizes,
                        max_buckets=1) as batches:
        assert [b.name for b in batches.buckets] == ["32x24"] and not batches.plan.dropped


def test_200_000_records_of_sources_plan_in_flat_memory():
    sizes = np.random.default_rng(0).integers(16, 40, (200_000, 2)) * 64
    shares = Shares(np.repeat([0, 1], 100_000), (1.0, 3.0))
    plan = Plan(index_of(sizes), build_layout("multi", 4096), 64, shares=shares)
    for step in (0, plan.steps_per_epoch - 1, 7 * plan.steps_per_epoch):
        plan.batch(step)
    held = sum(s.records.nbytes + s.turns.nbytes for e in plan._epochs.values() for s in e.groups)
    assert len(plan._epochs) == 2 and held < 2 * 200_000 * 14  # 12 bytes a record and epoch


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_an_epoch_is_the_same_on_any_hosts_and_workers(folder, processes, workers):
    path = write(folder, many={"weight": 3}, few={"weight": 1})
    with build_pipeline(path, 4, **RANDOM, threads=0) as batches:
        steps = batches.steps_per_epoch
        whole = [next(batches) for _ in range(steps)]
    records = []
    for process in range(processes):
        rows = process_rows(4, process, processes)
        with build_pipeline(path, 4, **RANDOM, process=process, processes=processes,
                            workers=workers) as batches:
            for batch in whole:
                mine = next(batches)
                assert digest(mine) == digest({k: v[rows] for k, v in batch.items()})
                records += mine["record"].tolist()
    assert sorted(records) == sorted(r for batch in whole for r in batch["record"].tolist())


def test_a_mixture_is_a_data_set(folder):
    mixture = open_data(write(folder))
    assert isinstance(mixture, Mixture) and mixture.manifest["sources"] == {"many": 16, "few": 3}
    assert [mixture[i].source for i in (0, 15, 16, 18)] == ["many", "many", "few", "few"]
