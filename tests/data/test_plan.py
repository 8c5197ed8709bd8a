import collections
import copy
import time

import numpy as np
import pytest

from pid_jax.data import randomness
from pid_jax.data.buckets import build_layout
from pid_jax.data.index import Index, Texts
from pid_jax.data.plan import Plan, process_rows
from pid_jax.errors import UserError

TWO = build_layout("custom", 0, ("64x64", "96x64"))


def index_of(sizes) -> Index:
    width, height = np.array(sizes, np.int32).reshape(-1, 2).T
    zeros = np.zeros(len(width), np.int32)
    texts = Texts(np.zeros(0, np.uint8), zeros.astype(np.int64))
    return Index(texts, texts, width, height, zeros, zeros, zeros)


MIXED = index_of([(100, 100)] * 11 + [(150, 100)] * 6 + [(10, 10)] * 3)


def epoch_of(plan, number):
    first = number * plan.steps_per_epoch
    return [plan.batch(step) for step in range(first, first + plan.steps_per_epoch)]


@pytest.mark.parametrize("remainder, steps, drops", [("repeat", 5, 3), ("drop", 3, 3)])
def test_an_epoch_shows_every_record_once(remainder, steps, drops):
    plan = Plan(MIXED, TWO, 4, remainder=remainder)
    assert (plan.steps_per_epoch, plan.dropped) == (steps, drops)
    for number in range(3):
        slots = [slot for batch in epoch_of(plan, number) for slot in batch]
        first_turns = collections.Counter(s.record for s in slots if s.turn == 0)
        assert set(first_turns.values()) == {1}
        assert remainder == "drop" or len(first_turns) == 17
        assert all(slot.epoch == number for slot in slots)


def test_batches_have_one_bucket_and_fill_up_from_it():
    plan = Plan(MIXED, TWO, 4)
    for batch in epoch_of(plan, 0):
        assert len({slot.bucket for slot in batch}) == 1
        wide = batch[0].bucket.name == "96x64"
        assert all((11 <= slot.record < 17) == wide for slot in batch)


def test_a_bucket_smaller_than_the_batch_repeats_in_turns():
    slots = Plan(index_of([(64, 64)] * 3), TWO, 8).batch(0)
    assert [s.turn for s in slots] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert len({(s.record, s.turn) for s in slots}) == 8


def test_dropped_records_change_from_epoch_to_epoch():
    plan = Plan(index_of([(64, 64)] * 7), TWO, 4, remainder="drop")
    seen = {slot.record for number in range(8) for batch in epoch_of(plan, number)
            for slot in batch}
    assert seen == set(range(7))


def test_order_depends_on_seed_and_epoch_only():
    plan, same, other = (Plan(MIXED, TWO, 4, seed=s) for s in (1, 1, 2))
    backwards = [same.batch(step) for step in reversed(range(20))][::-1]
    assert [plan.batch(step) for step in range(20)] == backwards
    assert [copy.deepcopy(plan).batch(7)] == [plan.batch(7)]
    assert epoch_of(plan, 0) != epoch_of(other, 0)
    records = [[slot.record for batch in epoch_of(plan, n) for slot in batch] for n in (0, 1)]
    assert records[0] != records[1]


def test_order_is_pinned():
    plan = Plan(MIXED, TWO, 4, seed=5)
    assert [slot.record for slot in plan.batch(3) + plan.batch(12)] == [
        14, 13, 11, 15, 10, 4, 3, 6]


def test_unshuffled_plans_follow_the_data_set():
    plan = Plan(MIXED, TWO, 4, shuffle=False)
    records = [slot.record for batch in epoch_of(plan, 2) for slot in batch]
    assert records[:11] == list(range(11)) and records[12:18] == list(range(11, 17))


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_the_global_batch(processes):
    plan = Plan(MIXED, TWO, 4)
    for step in range(7):
        parts = [plan.batch(step, process_rows(4, p, processes)) for p in range(processes)]
        assert sum(parts, []) == plan.batch(step)


@pytest.mark.parametrize("call, message", [
    (lambda: process_rows(10, 0, 4), "10 cannot be split over 4"),
    (lambda: process_rows(4, 2, 2), "process 2 of 2"),
    (lambda: Plan(MIXED, TWO, 0), "batch size is 0"),
    (lambda: Plan(MIXED, TWO, 4, remainder="keep"), "'keep'"),
    (lambda: Plan(MIXED, build_layout("square", 512), 4), "512 x 512"),
    (lambda: Plan(MIXED, TWO, 64, remainder="drop"), "64 pictures")])
def test_impossible_plans(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_two_hundred_thousand_records_plan_in_seconds():
    sizes = np.random.default_rng(0).integers(1000, 6000, (200_000, 2))
    start = time.monotonic()
    plan = Plan(index_of(sizes), build_layout("multi", 4096), 64)
    plan.batch(plan.steps_per_epoch - 1)
    assert time.monotonic() - start < 20
    assert sum(plan.counts().values()) + plan.dropped == 200_000


def test_uniform_numbers_are_uniform_and_independent():
    numbers = randomness.uniform(3, np.arange(20_000))
    assert 0 <= numbers.min() and numbers.max() < 1
    assert np.histogram(numbers, 10, (0, 1))[0].std() < 100
    assert abs(np.corrcoef(numbers, randomness.uniform(4, np.arange(20_000)))[0, 1]) < 0.02


def test_permutations_hold_every_number_and_differ():
    orders = [randomness.permutation(50, seed) for seed in range(4)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_hashes_are_pinned():
    assert [int(h) for h in randomness.hashed(1, -2, np.arange(2))] == [
        16192449397257467738, 12462937557078717210]
