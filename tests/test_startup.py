"""What is refused before anything expensive, and the page that a run opens with."""

import socket

import jax
import pytest
from ml_collections import ConfigDict

from pid_jax import objectives, startup
from pid_jax.errors import UserError
from pid_jax.parallel import mesh as mesh_lib
from pid_jax.parallel import multihost
from pid_jax.training import checkpoint, storage
from tests import tiny

GIB = startup.GIB


@pytest.fixture(scope="module")
def config() -> ConfigDict:
    return tiny.config("pixeldit_t2i", "unused")


@pytest.fixture(scope="module")
def mesh():
    return mesh_lib.single_device()


@pytest.fixture(scope="module")
def state(config, mesh):
    return startup.planned_state(objectives.build(config, mesh), mesh)


def test_the_page_says_what_runs(config, mesh, state):
    plan, size = startup.memory_plan(state), startup.checkpoint_bytes(state)
    text = "\n".join(startup.page(config, mesh, state, plan, size, "/"))
    parameters = startup.count(state.params)
    for part in (f"parameters: {parameters:,}", "mesh: data 1 x fsdp 1 x sequence 1 on 1 x cpu",
                 "batch: 4 pictures an update, 4 read by this process", "plan: 4 steps",
                 "GiB free", "patience 1800 s, grace 300 s"):
        assert part in text, text


def test_plan_counts_every_part_once(state):
    plan = startup.memory_plan(state)
    parameters = 4 * startup.count(state.params)
    assert plan["parameters"] == plan["gradients"] == plan["averages"] == parameters
    assert parameters < plan["optimizer"] < 2.01 * parameters
    assert startup.checkpoint_bytes(state) == pytest.approx(
        plan["parameters"] + plan["averages"] + plan["optimizer"])


def test_a_state_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(startup, "device_memory", lambda: 8 * GIB)
    startup.check_memory({"parameters": 5 * GIB, "optimizer": 3 * GIB})
    with pytest.raises(UserError, match="take 16.0 GiB on each device, which has 8.0; divide them "
                                        "over more devices with config.mesh.fsdp"):
        startup.check_memory({"parameters": 5 * GIB, "optimizer": 11 * GIB})


def test_a_disk_without_room_is_refused(tmp_path):
    storage.refuse_full(tmp_path / "later", 1, "a checkpoint")
    with pytest.raises(UserError, match="a checkpoint takes .* GiB and the disk of .*later has"):
        storage.refuse_full(tmp_path / "later", 1 << 60, "a checkpoint")
    storage.refuse_full("gs://bucket/run", 1 << 60, "a checkpoint")  # a bucket has no end


def test_one_process_has_nobody_to_differ_from(config, tmp_path):
    startup.check_processes(config)
    startup.check_shared(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_never_appears(tmp_path, monkeypatch):
    monkeypatch.setattr(startup, "SHARED_SECONDS", 0.3)
    assert not startup._appears(tmp_path / "mark")
    (tmp_path / "mark").touch()
    assert startup._appears(tmp_path / "mark")


@pytest.mark.parametrize("address, sentence", [
    ("host0", "PID_JAX_COORDINATOR is 'host0'; expected host:port"),
    ("host0:99999", "PID_JAX_COORDINATOR is 'host0:99999'; expected host:port"),
    ("127.0.0.1:1", "does not answer process 1 .* a loopback address reaches the processes of one "
                    "host only")])
def test_a_coordinator_that_cannot_be_reached(address, sentence):
    with pytest.raises(UserError, match=sentence):
        multihost.refuse_unreachable(address, 1, seconds=0.1)


def test_a_coordinator_that_answers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        multihost.refuse_unreachable(f"127.0.0.1:{server.getsockname()[1]}", 1, seconds=5)
    multihost.refuse_unreachable("127.0.0.1:1", 0)  # process 0 makes it


def test_a_coordinator_with_an_address_in_brackets(monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "create_connection",
                        lambda address, timeout: asked.append(address) or socket.socket())
    multihost.refuse_unreachable("[2001:db8::1]:29400", 1, seconds=5)
    assert asked == [("2001:db8::1", 29400)]


def test_one_process_votes_for_itself(mesh):
    vote = multihost.Vote(mesh)
    assert [vote.ask(flag) for flag in (False, True, False)] == [False, True, False]


def test_paths_in_a_bucket_keep_their_scheme(tmp_path):
    path = storage.as_path("gs://bucket/run") / "checkpoints" / "12"
    assert str(path) == "gs://bucket/run/checkpoints/12" and path.name == "12"
    assert storage.as_path(tmp_path) == tmp_path


@pytest.mark.parametrize("place, sentence", [
    ("http://host/run", "http://host/run is no place for checkpoints; expected a folder or gs://"),
    ("az://bucket/run", "az://bucket/run cannot be reached: "),  # no package that reads it
    ("a" * 5000, "aa cannot be reached: File name too long")])
def test_checkpoints_of_no_place_are_a_sentence(place, sentence):
    with pytest.raises(UserError, match=sentence):
        checkpoint.find_step_folder(place)


def test_checkpoints_in_another_place_than_the_workdir(tmp_path, config):
    one = jax.numpy.int32(1)
    state = checkpoint.TrainState(step=one, params={"kernel": jax.numpy.ones(2)},
                                  opt_state={"count": one}, ema={})
    checkpointer = checkpoint.Checkpointer(tmp_path / "run", 1, str(tmp_path / "far"))
    checkpointer.save(state, {}, config)
    checkpointer.close()
    assert checkpoint.find_step_folder(tmp_path / "far").name == "1"
    assert not (tmp_path / "run" / "checkpoints").exists()
