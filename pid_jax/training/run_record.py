"""`runs.jsonl`: one line for every start of a run, with what is needed to repeat it."""

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import pid_jax
from pid_jax import config as config_lib
from pid_jax.errors import UserError

FILE = "runs.jsonl"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "pillow",
            "ml-collections")
VARIABLES = ("JAX_", "XLA_", "LIBTPU_", "CUDA_VISIBLE_DEVICES")


def append(workdir: Path, config: ConfigDict, mesh: Mesh, step: int,
           command: Sequence[str] = sys.argv) -> None:
    """Adds the line of this start; call it before `config.json` is replaced.

    Args:
      step: updates done before it.
    """
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "step": step,
            "command": list(command), "changed": changes(workdir, config), **code(),
            **versions(), **machine(mesh)}
    with (workdir / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def changes(workdir: Path, config: ConfigDict) -> list[str]:
    """`path: old -> new` of every value that differs from the start before.

    Raises:
      UserError: the config of that start cannot be read.
    """
    path = workdir / "config.json"
    if not path.exists():
        return []
    try:
        before = config_lib.with_defaults(config_lib.from_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}, the config of the start before, cannot be read ({error}); remove "
                        "it to go on") from error
    return list(config_lib.differences(before, config, tuple(sorted(config))))


@functools.cache  # asked for twice while a run starts
def code() -> dict[str, Any]:
    """Version, digest of the package's source, and the commit where there is a repository."""
    root = Path(pid_jax.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return {"pid_jax": pid_jax.__version__, "code_sha256": digest.hexdigest(),
            "commit": _commit(root)}


def _commit(root: Path) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"],
                                capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def versions() -> dict[str, Any]:
    """Python and the packages that numbers depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    environment = {name: value for name, value in sorted(os.environ.items())
                   if name.startswith(VARIABLES)}
    return {"python": platform.python_version(), "packages": found, "environment": environment}


def machine(mesh: Mesh) -> dict[str, Any]:
    """Platform, devices, processes and the mesh."""
    return {"platform": platform.platform(), "processes": jax.process_count(),
            "devices": len(jax.devices()), "device_kind": mesh.devices.flat[0].device_kind,
            "mesh": dict(mesh.shape)}
