import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from pid_jax import compilation_cache

LATE = """
import sys, jax
jax.jit(lambda x: x + 1)(1.0)  # a program of one's own that compiled something before
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
from pid_jax.errors import UserError
from pid_jax.inference import PixelDecoder
try:
    PixelDecoder.from_checkpoint(sys.argv[1])
except UserError:
    jax.jit(lambda x: x * 2)(1.0)
"""


def test_loading_a_checkpoint_turns_the_cache_on(tmp_path):
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("JAX_") or name == "JAX_PLATFORMS"}
    subprocess.run([sys.executable, "-c", LATE, str(tmp_path / "none")], check=True,
                   env=environment | {"XDG_CACHE_HOME": str(tmp_path)})
    assert any((tmp_path / compilation_cache.FOLDER).iterdir())


def test_the_folder_is_the_one_asked_for_or_the_users(tmp_path, monkeypatch):
    config = SimpleNamespace(jax_compilation_cache_dir=None, update=lambda name, value: setattr(
        config, name, value))
    monkeypatch.setattr(compilation_cache, "jax", SimpleNamespace(config=config))
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without a home
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert compilation_cache.enable() is None and config.jax_compilation_cache_dir is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = tmp_path / compilation_cache.FOLDER
    assert compilation_cache.enable() == wanted == Path(config.jax_compilation_cache_dir)
    assert compilation_cache.enable(tmp_path) == tmp_path == compilation_cache.enable()
