"""Codebook measures and the history of evaluations."""

import json

import numpy as np
import pytest

from pid_jax import show_eval_results
from pid_jax.errors import UserError
from pid_jax.evaluation import codebook, history, reconstruction
from pid_jax.evaluation.history import Evaluation
from pid_jax.images import to_float


def test_codebook_measures():
    counts = codebook.histogram(np.array([[0, 0], [1, 1]]), 4)
    assert counts.tolist() == [2, 2, 0, 0]
    assert abs(codebook.entropy(counts) - 1) < 1e-6 and codebook.usage(counts) == 0.5
    assert round(codebook.fixed_bpp(32, 4096, 256, 256), 6) == 0.005859
    assert round(codebook.fixed_bpp(32, 1024, 256, 256), 6) == 0.004883
    assert codebook.entropy_coded_bpp(32, counts, 8, 8) == 0.5
    with pytest.raises(UserError, match="reach from 0 to 4"):
        codebook.histogram(np.array([0, 4]), 4)
    with pytest.raises(UserError, match="no tokens"):
        codebook.entropy(np.zeros(4))


@pytest.fixture
def folder(tmp_path):
    sheet = np.zeros((4, 4, 3), np.uint8)
    for step, psnr, rfid in ((6000, 21.0, 30.0), (3000, 20.0, 40.0)):
        history.record(tmp_path, Evaluation(step, {"psnr": psnr, "rfid": rfid},
                                            {"lpips": "no weights"}, {"pictures": 2}), sheet)
    return tmp_path


def test_files_are_named_as_the_guide_says(folder):
    names = sorted(p.name for p in (folder / "evaluation_history").iterdir())
    assert names == ["comparison_step00003000.png", "comparison_step00006000.png",
                     "eval_step00003000.json", "eval_step00006000.json",
                     "evaluation_summary.jsonl"]
    lines = (folder / "evaluation_history" / "evaluation_summary.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3000, 6000]


def test_the_api_reads_them_back(folder):
    found = history.read_history(folder)
    assert [e.step for e in found] == [3000, 6000] and found[0].unavailable == {
        "lpips": "no weights"}
    assert [e.step for e in history.best(found, "psnr", 1)] == [6000]
    assert [e.step for e in history.best(found, "rfid", 5)] == [6000, 3000]
    trend = history.trend(found, "rfid")
    assert (trend.change, trend.percent, trend.improved) == (-10.0, -25.0, True)
    assert history.to_csv(found).splitlines() == ["step,psnr,rfid", "3000,20.0,40.0",
                                                  "6000,21.0,30.0"]
    with pytest.raises(UserError, match="no evaluation has the metric 'ssim'"):
        history.best(found, "ssim", 1)


def test_an_evaluation_of_the_same_step_replaces(folder):
    history.record(folder, Evaluation(3000, {"psnr": 25.0}))
    assert history.read_history(folder)[0].metrics == {"psnr": 25.0}
    summary = folder / "evaluation_history" / "evaluation_summary.jsonl"
    assert len(summary.read_text().splitlines()) == 2


def test_damage_and_absence_are_named(folder, tmp_path_factory):
    whole = '{"step": %s, "metrics": {"psnr": %s}, "unavailable": {}, "note": {}}'
    for text in ("{}", "[" * 100_000, whole % ("Infinity", 1), whole % (1.5, 1),
                 whole % (1, "NaN")):
        (folder / "evaluation_history" / "eval_step00003000.json").write_text(text)
        with pytest.raises(UserError, match="is damaged"):
            history.read_history(folder)
    with pytest.raises(UserError, match="holds no evaluations"):
        history.read_history(tmp_path_factory.mktemp("empty"))
    with pytest.raises(UserError, match="not finite: psnr"):
        history.record(folder, Evaluation(1, {"psnr": float("nan")}))


def test_the_command_prints_table_trend_and_csv(folder, capsys):
    table = folder / "table.csv"
    show_eval_results.main(["--output-dir", str(folder), "--top-k", "1", "--metric", "rfid",
                            "--trend", "--export", str(table)])
    printed = capsys.readouterr().out
    assert "6000" in printed and "lpips: unavailable, no weights" in printed
    assert "rfid: 40.0000 at step 3000 -> 30.0000 at step 6000, -10.0000 (-25.00 %)" in printed
    assert table.read_text().startswith("step,psnr,rfid\n")
    with pytest.raises(UserError, match="--metric belongs to --top-k"):
        show_eval_results.main(["--output-dir", str(folder), "--metric", "rfid"])


def test_scores_without_weights_say_what_is_missing():
    rng = np.random.default_rng(0)
    truth = rng.uniform(-1, 1, (2, 16, 16, 3)).astype(np.float32)
    scores = reconstruction.Scores(8, mean_picture=np.zeros((16, 16, 3), np.float32))
    scores.add(truth, truth * 0.9, rng.integers(0, 8, (2, 4)))
    found = scores.results()
    assert found["psnr"] > found["psnr_mean_colour"] and "psnr_mean_picture" in found
    assert found["bpp"] == 4 * 3 / 256
    assert scores.unavailable.keys() == {"rfid", "is_1_split", "is_10_splits", "lpips"}


def test_a_blank_picture_drawn_exactly_spoils_no_mean():
    truth = np.stack([np.ones((16, 16, 3), np.float32), np.zeros((16, 16, 3), np.float32)])
    scores = reconstruction.Scores(8)
    scores.add(truth, np.ones_like(truth), np.zeros((2, 4), int))
    found = scores.results()
    assert found["psnr_mean_colour"] == 100 and 50 < found["psnr"] < 60


def test_bytes_for_inception_are_truncated_but_keep_bytes():
    exact = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, -1)
    np.testing.assert_array_equal(reconstruction.inception_bytes(to_float(exact)), exact)
    assert reconstruction.inception_bytes(np.float32([[[[0.9 / 127.5 - 1] * 3]]])).max() == 0
