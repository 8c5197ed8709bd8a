"""Which checkpoints stay."""

import types

import pytest

from pid_jax.errors import UserError
from pid_jax.training.retention import Retention


def kept(retention, *steps):
    infos = [types.SimpleNamespace(step=step) for step in steps]
    answers = retention.should_preserve(infos, context=None)
    return [step for step, stays in zip(steps, answers) if stays]


def test_newest_every_and_best_stay():
    steps = (100, 200, 300, 400, 500)
    assert kept(Retention(2), *steps) == [400, 500]
    assert kept(Retention(1, every=200), *steps) == [200, 400, 500]
    assert kept(Retention(1, best={"step": 300}), *steps) == [300, 500]


@pytest.mark.parametrize("metric, best", [
    ("psnr_sample", 2), ("lq_de2000_sample", 1), ("artefact_pattern", 1)])
def test_best_follows_the_direction_of_the_metric(tmp_path, metric, best):
    retention = Retention(1, metric=metric)
    for step, value in enumerate([3.0, 1.0, 5.0]):
        retention.offer(tmp_path, step, {metric: value})
    assert retention.best["step"] == best
    again = Retention(1, metric=metric)
    again.load(tmp_path, [best])
    assert again.best == retention.best
    gone = Retention(1, metric=metric)
    gone.load(tmp_path, [7])
    assert gone.best is None


def test_other_scores_are_not_offered(tmp_path):
    retention = Retention(1)
    assert not retention.offer(tmp_path, 1, {"psnr_sample": 30.0})
    assert not (tmp_path / "best.json").exists()


def test_a_score_that_no_sample_has_is_said(tmp_path, caplog):
    retention = Retention(1, metric="psnr_smaple")
    assert not retention.offer(tmp_path, 1, {})  # not a step with samples
    assert not caplog.text
    assert not retention.offer(tmp_path, 1, {"psnr_sample": 30.0})
    assert "'psnr_smaple', which the samples have no score for; they have psnr" in caplog.text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"step": 1, "metric": "a", "value": "b"}'])
def test_a_garbled_record_is_a_sentence(tmp_path, content):
    (tmp_path / "best.json").write_text(content)
    with pytest.raises(UserError, match="best.json does not say which checkpoint is the best"):
        Retention(1, metric="a").load(tmp_path, [1])
