"""Which meshes are tried, in which order, and which are refused."""

import pytest

from pid_jax.ahead_of_time.fit import Candidate, candidates
from pid_jax.errors import UserError

HEADS = (24, 16)


def test_order_is_least_repetition_then_whole_heads_then_short_sequences():
    found = candidates(16, batch=4, accumulate=1, tokens=65536, heads=HEADS,
                       policies=("attention", "full"))
    assert found[0] == Candidate((1, 4, 4), "attention")
    assert [c.remat for c in found] == sorted(c.remat for c in found)
    first_policy = [c.shape for c in found if c.remat == "attention"]
    assert first_policy.index((1, 1, 16)) == len(first_policy) - 1  # 16 does not divide 24 heads
    assert all(4 % (data * fsdp) == 0 for data, fsdp, _ in first_policy)


def test_micro_batches_count():
    found = candidates(8, batch=8, accumulate=2, tokens=64, heads=HEADS, policies=("none",))
    assert {4 % (c.shape[0] * c.shape[1]) for c in found} == {0}


def test_nothing_divides():
    with pytest.raises(UserError, match="no mesh of 16 devices divides 1 pictures and 100"):
        candidates(16, batch=1, accumulate=1, tokens=100, heads=HEADS, policies=("full",))
