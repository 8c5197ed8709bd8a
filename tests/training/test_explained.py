"""What the loop makes of storage that fails and of processes that die."""

import jax
import pytest

from pid_jax import train
from pid_jax.errors import RunFailed, TryAgain, UserError
from pid_jax.parallel import multihost
from pid_jax.parallel.patience import Patience


class FourIsGood:
    def last_good(self):
        return "the newest complete checkpoint is of step 4"


def explained(error):
    waiting = Patience()
    waiting.note("step 7")
    with train.explained(FourIsGood(), waiting):
        raise error


def test_a_full_disk_names_the_file_and_the_last_good_step():
    with pytest.raises(RunFailed, match="No space left on device: run/metrics.jsonl; the newest "
                                        "complete checkpoint is of step 4; make room") as found:
        explained(OSError(28, "No space left on device", "run/metrics.jsonl"))
    assert found.value.exit_code == 1


def test_a_data_worker_that_died_can_be_tried_again():
    with pytest.raises(TryAgain, match="a data worker died at step 7 .*exit code -9") as found:
        explained(RuntimeError("Worker process was terminated unexpectedly with exit code -9."))
    assert found.value.exit_code == 75


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
@pytest.mark.parametrize("text", ["UNAVAILABLE: Gloo all-reduce failed: Connection closed by peer",
                                  "DEADLINE_EXCEEDED: Barrier timed out"])
def test_a_lost_process_can_be_tried_again(monkeypatch, text, kind):
    monkeypatch.setattr(multihost.jax, "process_count", lambda: 2)
    with pytest.raises(TryAgain, match="process 0 of 2 lost another process at step 7 .*newest"):
        explained(kind(text))


def test_a_process_lost_before_the_first_step_can_be_tried_again(monkeypatch):
    monkeypatch.setattr(multihost.jax, "process_count", lambda: 2)
    with pytest.raises(TryAgain, match="lost another process at the start .*no step was done"), (
            train.lost_processes(Patience())):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: Connection reset by peer")
    with pytest.raises(UserError), train.lost_processes(Patience()):
        raise UserError("the barrier of an option")


@pytest.mark.parametrize("error", [
    jax.errors.JaxRuntimeError("UNAVAILABLE: alone there is nobody to lose"),
    RuntimeError("a fault of the program"), ValueError("another")])
def test_faults_of_the_program_stay_what_they_are(error):
    with pytest.raises(type(error), match=str(error)):
        explained(error)
