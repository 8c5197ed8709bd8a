"""The whole way by command line: a PyTorch file, converted, decoded, generated with, trained from.

Every command runs in its own process, as a user runs it: minutes on a small machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pid_jax.config import to_json
from tests import drawing, tiny
from tests.tools import forge
from tools.convert_torch_weights.mappings import table_for
from tools.convert_torch_weights.settings import model_options

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CONFIG = """from tests import tiny

def get_config():
    return tiny.config({objective!r}, {data!r})
"""


def run(module: str, *arguments) -> tuple[int, str]:
    """Exit status and what was printed on stderr."""
    done = subprocess.run([sys.executable, "-m", module, *map(str, arguments)], cwd=ROOT,
                          capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    return done.returncode, done.stderr


def refused(words: str, module: str, *arguments) -> None:
    status, printed = run(module, *arguments)
    error = printed.splitlines()[-1]
    assert status == 2 and error.startswith("error: ") and words in error, printed


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A data set, a config and a converted folder of each objective."""
    folder = tmp_path_factory.mktemp("made")
    tiny.write_dataset(folder / "data")
    drawing.write_photo(folder / "small.png", 16, 16)
    for objective in ("pid_teacher", "pixeldit_t2i"):
        (folder / f"{objective}.py").write_text(CONFIG.format(objective=objective,
                                                              data=str(folder / "data")))
        config = tiny.config(objective, folder / "data")
        (folder / f"{objective}.json").write_text(to_json(config))
        rng = np.random.default_rng(0)
        forge.save(folder / f"{objective}.pth", {
            f"net.{key}": 0.2 * rng.standard_normal(shape).astype(np.float32)
            for key, shape in table_for(*model_options(config)).shapes().items()})
        status, printed = run("tools.convert_torch_weights", "convert",
                              "--src", folder / f"{objective}.pth", "--config",
                              folder / f"{objective}.json", "--dst", folder / objective)
        assert status == 0, printed
    return folder


def test_decode(made, tmp_path):
    status, printed = run("pid_jax.decode", "--checkpoint", made / "pid_teacher", "--out", tmp_path,
                          "--input", made / "small.png")
    assert status == 0, printed
    assert Image.open(tmp_path / "small" / "sigma_0.000.png").size == (32, 32)
    refused("of the objective 'pixeldit_t2i'", "pid_jax.decode", "--checkpoint",
            made / "pixeldit_t2i", "--out", tmp_path, "--input", made / "small.png")


def test_generate(made, tmp_path):
    status, printed = run("pid_jax.generate", "--checkpoint", made / "pixeldit_t2i", "--out",
                          tmp_path, "--prompts", "a ramp", "--size", "16x24")
    assert status == 0, printed
    assert Image.open(tmp_path / "000.png").size == (24, 16)
    refused("of the objective 'pid_teacher'", "pid_jax.generate", "--checkpoint",
            made / "pid_teacher", "--out", tmp_path, "--prompts", "a ramp")


@pytest.mark.parametrize("source", ["pid_teacher", "pixeldit_t2i"])
def test_training_starts_from_them(made, tmp_path, source):
    status, printed = run("pid_jax.main", f"--config={made / 'pid_teacher.py'}",
                          f"--workdir={tmp_path / 'run'}", f"--config.init_from={made / source}",
                          "--config.total_steps=1")
    assert status == 0, printed
    assert (tmp_path / "run" / "checkpoints" / "1").is_dir()


def test_training_of_another_network_is_refused(made, tmp_path):
    refused("holds another model", "pid_jax.main", f"--config={made / 'pixeldit_t2i.py'}",
            f"--workdir={tmp_path / 'run'}", f"--config.init_from={made / 'pid_teacher'}")
    refused("hidden_size", "pid_jax.main", f"--config={made / 'pixeldit_t2i.py'}",
            f"--workdir={tmp_path / 'run'}", f"--config.init_from={made / 'pixeldit_t2i'}",
            "--config.model.hidden_size=50")


def test_a_folder_whose_config_was_changed(made, tmp_path):
    """Weights and config that no longer fit each other are refused before anything is drawn."""
    step = made / "pid_teacher" / "checkpoints" / "0"
    text = (step / "config" / "metadata").read_text()
    try:
        changed = json.loads(text)
        changed["model"]["patch_depth"] += 1
        (step / "config" / "metadata").write_text(json.dumps(changed))
        for module, flags in (("pid_jax.decode", ("--checkpoint", made / "pid_teacher", "--out",
                                                  tmp_path, "--input", made / "small.png")),
                              ("tools.convert_torch_weights", ("export", made / "pid_teacher",
                                                               "--dst", tmp_path / "x.pth"))):
            refused(str(step), module, *flags)
    finally:
        (step / "config" / "metadata").write_text(text)
    assert not list(tmp_path.iterdir())
