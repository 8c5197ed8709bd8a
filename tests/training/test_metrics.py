"""The metrics file, the progress line, and what stops a run."""

import sys
import types

import numpy as np
import pytest

from pid_jax.errors import RunFailed, UserError
from pid_jax.training import metrics


def write(folder, *steps, first=0):
    writer = metrics.MetricsWriter(folder, first, tensorboard=False)
    for step in steps:
        writer.write(step, {"loss": np.float32(step / 2), "batch": "x"})
    writer.close()


def test_lines_come_back(tmp_path):
    write(tmp_path, 1, 2)
    assert metrics.read(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 0.5, "batch": "x"}, {"step": 2, "loss": 1.0, "batch": "x"}]


def test_resuming_cuts_later_steps_and_broken_lines(tmp_path):
    write(tmp_path, 1, 2, 3, 4)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    write(tmp_path, 3, first=2)
    assert [line["step"] for line in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_what_json_cannot_say_is_text(tmp_path):
    writer = metrics.MetricsWriter(tmp_path, 0, tensorboard=False)
    writer.write(1, {"loss": np.float32(np.inf)})
    writer.close()
    assert metrics.read(tmp_path / "metrics.jsonl")[0]["loss"] == "inf"


def test_tensorboard_gets_the_numbers(tmp_path):
    pytest.importorskip("tensorboardX")
    writer = metrics.MetricsWriter(tmp_path, 0)
    writer.write(1, {"loss": 0.5})
    writer.close()
    assert list((tmp_path / "tensorboard").glob("events.*"))


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_stop_names_step_metric_and_last_checkpoint(loss):
    with pytest.raises(RunFailed, match="loss is .* at step 7; the last good checkpoint is of "
                                        "step 5"):
        metrics.stop_if_not_finite(7, {"loss": loss}, 5)


def test_digest_knows_the_order():
    assert metrics.digest(["a", "b"]) != metrics.digest(["b", "a"])
    assert metrics.digest(["a", "b"]) == metrics.digest(["a", "b"])


def test_progress_line():
    progress = metrics.Progress(0, 600, 4)
    values = {"loss": 0.5123, "grad_norm": 1.25, "learning_rate": 1e-4}
    assert progress.line(20, {"train": values}).startswith(
        "step 20/600 | loss 0.5123 | grad 1.25 | lr 0.0001 | ")
    assert progress.line(20, {"student": values, "fake_score": values}).startswith(
        "step 20/600 | student loss 0.5123 | grad 1.25 | lr 0.0001 | fake_score loss 0.5123 | ")


def test_utilisation_is_work_over_peak(monkeypatch):
    clock = iter([0.0, *[2.0] * 9])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    progress = metrics.Progress(0, 600, 4, peak=100.0)
    progress.add_work(50.0)
    line = progress.line(1, {"train": {"loss": 0.5, "grad_norm": 1.0,
                                       "learning_rate": 1e-4}})
    assert "| 2.00 images/s | 25.0% MFU | 0:19:58 left" in line


@pytest.mark.parametrize("waited, ending", [
    (0.0, "left"), (0.015, "left"), (0.5, "left | 25% waiting for data")])
def test_waiting_for_data_is_said(monkeypatch, waited, ending):
    clock = iter([0.0, *[2.0] * 9])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    progress = metrics.Progress(0, 600, 4)
    progress.add_wait(waited)
    values = {"loss": 0.5, "grad_norm": 1.0, "learning_rate": 1e-4}
    assert progress.line(1, {"train": values}).endswith(ending)


class Board(types.ModuleType):
    """Stands in for the package wandb."""

    def __init__(self, fault=None):
        super().__init__("wandb")
        self.fault, self.runs, self.lines = fault, [], []

    def init(self, **options):
        if self.fault:
            raise self.fault
        self.runs.append(options)
        return types.SimpleNamespace(log=lambda values, step: self.lines.append((step, values)),
                                     finish=lambda: None)


def test_runs_of_one_name_are_two_runs_and_one_that_goes_on_is_one(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", board := Board())
    for parent in ("a", "b", "a"):
        folder = tmp_path / parent / "student"
        folder.mkdir(parents=True, exist_ok=True)
        writer = metrics.MetricsWriter(folder, 0, tensorboard=False, wandb="project")
        writer.write(1, {"loss": np.float32(0.5), "batch": "x"})
        writer.close()
    first, second, third = (run["id"] for run in board.runs)
    assert first == third != second and board.lines[0] == (1, {"loss": 0.5})


def test_a_board_that_cannot_start_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Board(RuntimeError("no API\nkey")))
    with pytest.raises(UserError, match="wandb 'p' cannot start: no API key; log in with `wandb l"):
        metrics.MetricsWriter(tmp_path, 0, tensorboard=False, wandb="p")


def test_norms_name_the_other_networks():
    assert metrics.norms({"grad_norm": 0.4, "loss": 1.0}) == "0.4"
    assert metrics.norms({"grad_norm": 0.4, "discriminator_grad_norm": 90.0}) == (
        "0.4 (discriminator 90.0)")


def test_smooth_is_unbiased():
    np.testing.assert_allclose(metrics.smooth([3.0] * 200), 3.0)
    assert metrics.smooth([5.0, 1.0], window=0.1)[0] == 5.0


def test_plot_is_drawn_also_without_lines(tmp_path):
    assert metrics.plot(tmp_path).stat().st_size > 1000


def test_garbled_lines_are_left_out(tmp_path):
    path = tmp_path / metrics.FILE
    path.write_bytes(b'{"step": 1}\n\x00\xff\n[1]\n{"a": 1}\n{"step": 2}\n{"st')
    assert metrics.read(path) == [{"step": 1}, {"step": 2}]
