"""Whether this machine can train: `python -m pid_jax.check_env`; one page that ends in PASS.

    python -m pid_jax.check_env --platform=tpu --workdir=DIR --config=configs/X.py

Looks at versions, devices, the attention kernels of the platform (each is compiled and compared
with a dense product), the weight files of the config's encoders, free space, and runs one tiny
training step. Of a host of a pod it looks at that host alone. Exit status: 0 PASS, 1 something is
missing, 2 bad input.
"""

import importlib.metadata
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from pid_jax import command_line, config_flag
from pid_jax.config_flag import CONFIG
from pid_jax.errors import RunFailed, UserError

flags.adopt_module_key_flags(config_flag)
PLATFORM = flags.DEFINE_enum("platform", None, ("cpu", "gpu", "tpu"),
                             "what must be here; default: whatever is")
WORKDIR = flags.DEFINE_string("workdir", ".", "folder whose disk must have room")
FREE = flags.DEFINE_float("free_gib", 1.0, "room that its disk must have, GiB", lower_bound=0)

GIB = 2**30
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "absl-py",
            "array_record", "clu", "einops", "matplotlib", "ml_collections", "msgpack", "numpy",
            "Pillow", "safetensors", "tensorflow-datasets")
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # of outputs of size 1
NETWORK = {"hidden_size": 64, "num_groups": 2, "patch_size": 8, "patch_depth": 2,
           "pixel_hidden_size": 4, "pixel_attn_hidden_size": 32, "pixel_num_groups": 2,
           "pixel_depth": 1, "txt_embed_dim": 16, "txt_max_length": 4, "repa_encoder_index": -1}
SIZE = 32


class Finding(NamedTuple):
    """One line of the page; `missing` says that it has to change."""

    what: str
    text: str
    missing: bool = False


def main() -> None:
    """Prints the page.

    Raises:
      RunFailed: something is missing.
    """
    checks = [versions, devices, kernels, encoder_files, space, training_step]
    findings = [finding for check in checks for finding in looked_at(check)]
    missing = [finding for finding in findings if finding.missing]
    if not missing:
        print("PASS")
    else:
        raise RunFailed(f"{len(missing)} of {len(findings)} checks found something missing: " +
                        "; ".join(f"{finding.what}: {finding.text}" for finding in missing))


def looked_at(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Runs a check and prints what it finds; an exception is a finding too."""
    found = check()
    while True:
        try:
            finding = next(found)
        except StopIteration:
            return
        except Exception as error:
            reason = str(error) if isinstance(error, UserError) else (
                f"{type(error).__name__}: {error}")
            finding = Finding(check.__name__.replace("_", " "), " ".join(reason.split())[:300],
                              True)
        print(f"{'MISSING' if finding.missing else 'ok':8}{finding.what:16} {finding.text}",
              flush=True)
        yield finding


def versions() -> Iterator[Finding]:
    """Python and the packages that pid_jax asks for."""
    yield Finding("python", sys.version.split()[0], sys.version_info < (3, 11))
    absent = [name for name in PACKAGES if not _version(name)]
    yield Finding("packages", f"pip install {' '.join(absent)}" if absent else
                  ", ".join(f"{name} {_version(name)}" for name in PACKAGES[:6]), bool(absent))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> Iterator[Finding]:
    """The devices of this host, their kind, memory, and the peak that MFU is measured against."""
    import jax

    from pid_jax.flops import peak_flops
    from pid_jax.parallel.kernels import platform_of

    local = jax.local_devices()
    kind, platform = local[0].device_kind, platform_of(local[0])
    wrong = PLATFORM.value not in (None, platform)
    hint = f"; --platform asks for {PLATFORM.value}: pip install '.[{_extra()}]', and look at the "\
           "driver" if wrong else ""
    yield Finding("devices", f"{len(local)} x {kind} ({platform}){hint}", wrong)
    limit = (local[0].memory_stats() or {}).get("bytes_limit")
    yield Finding("device memory", f"{limit / GIB:.1f} GiB each" if limit else "the host's: "
                  f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / GIB:.1f} GiB")
    peak = peak_flops(local[0])
    yield Finding("peak", f"{peak / 1e12:.0f} TFLOP/s each, bfloat16" if peak else
                  "not known: no MFU in the log")


def _extra() -> str:
    return {"gpu": "cuda12", "tpu": "tpu"}.get(PLATFORM.value, "test")


def kernels() -> Iterator[Finding]:
    """Compiles this platform's attention kernels, forward and backward, against a dense one."""
    import jax

    from pid_jax.parallel import kernels as local

    platform = local.platform_of(jax.local_devices()[0])
    names = [("dense", "float32"), ("chunked", "float32")]
    names += {"tpu": [("splash", "bfloat16")], "gpu": [("cudnn", "bfloat16")]}.get(platform, [])
    for name, dtype in names:
        began = time.monotonic()
        error = _kernel_error(local.local_kernel(name, jax.local_devices()[0]), dtype)
        yield Finding(f"kernel {name}", f"{dtype}, differs from a dense product by {error:.1e} of "
                      f"its largest value, {time.monotonic() - began:.1f} s",
                      not error < TOLERANCE[dtype])


def _kernel_error(kernel: Callable, dtype: str) -> float:
    """Largest difference of output and gradients, relative to the largest value of each."""
    import jax
    import jax.numpy as jnp

    from pid_jax.models.attention import softmax_attention

    q, k, v = (jax.random.normal(key, (1, 640, 2, 64)) for key in
               jax.random.split(jax.random.key(0), 3))

    def answers(function: Callable, kind: str) -> list[np.ndarray]:
        def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = function(*(array.astype(kind) for array in arrays)).astype(jnp.float32)
            return jnp.square(out).sum(), out

        (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
        return [np.asarray(array) for array in (out, *gradients)]

    with jax.default_matmul_precision("highest"):
        exact = answers(softmax_attention, "float32")
    return max(float(np.abs(found - wanted).max() / np.abs(wanted).max())
               for found, wanted in zip(answers(kernel, dtype), exact))


def encoder_files() -> Iterator[Finding]:
    """The weights and the tokenizer that the config's encoders read, without loading them."""
    if CONFIG.value is None:
        yield Finding("encoder files", "not looked at: no --config")
        return
    from pid_jax import encoders
    from pid_jax.config import check_config

    config = CONFIG.value
    check_config(config)
    yield Finding("text encoder", _described(encoders.build_text_encoder, config.text))
    if config.model.name == "pidnet":
        yield Finding("codec", _described(encoders.build_codec, config.codec))


def _described(build: Callable, options: ConfigDict) -> str:
    """The encoder and its folder; building it refuses weights of something else."""
    from pid_jax.encoders.caption_tokenizer import load_tokenizer
    from pid_jax.encoders.weights import CARD, ORIGINS, RANDOM, TENSORS, folder_of

    build(**options)
    name, weights = options.name, options.get("weights", RANDOM)
    if name not in ORIGINS or weights == RANDOM or options.get("stored"):
        return f"{name} reads {options.get('stored') or 'no files'}"
    folder = folder_of(name, weights)
    for file in (CARD, TENSORS):
        if not (folder / file).is_file():
            raise UserError(f"{folder / file} is missing: python -m tools.convert_torch_weights "
                            f"encoder --name {name} {ORIGINS[name].flags} --dst {folder}")
    if "tokenizer" in options:
        load_tokenizer(Path(options.tokenizer) if options.tokenizer else folder)
    return f"{name} reads {folder}"


def space() -> Iterator[Finding]:
    """Room for checkpoints, and for what workers hand over in shared memory."""
    folder = Path(WORKDIR.value).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / GIB
    writable = folder.is_dir() and os.access(folder, os.W_OK)
    few = not free >= FREE.value
    yield Finding("disk", f"{free:.1f} GiB free at {folder}" + (
        f"; --free_gib asks for {FREE.value:g}" if few else "") + (
        "" if writable else "; it cannot be written to"), few or not writable)
    shared = Path("/dev/shm")
    if shared.exists():
        yield Finding("shared memory", f"{shutil.disk_usage(shared).free / GIB:.1f} GiB free")


def training_step() -> Iterator[Finding]:
    """One update of a tiny text-to-image network in float32, on this host's first device."""
    import jax
    import jax.numpy as jnp

    from pid_jax import objectives

    objective = objectives.build(tiny_config())
    rng = np.random.default_rng(0)
    batch = {name: jnp.asarray(rng.uniform(-1, 1, shape.shape), shape.dtype)
             for name, shape in objective.batch_shapes(2, SIZE, SIZE).items()}
    began = time.monotonic()
    state = jax.jit(objective.init)(jax.random.key(0))
    _, metrics = jax.jit(objective.step)(state, batch)
    loss = float(metrics["loss"])
    yield Finding("training step", f"loss {loss:.4f}, {time.monotonic() - began:.1f} s with "
                  "compilation", not np.isfinite(loss))


def tiny_config() -> ConfigDict:
    """A text-to-image run of a network of 0.1 M parameters."""
    from pid_jax.config import base_config

    config = base_config()
    config.model = ConfigDict({"name": "pixeldit_t2i", "rope_ref_h": SIZE, "rope_ref_w": SIZE,
                               **NETWORK})
    config.text = ConfigDict({"name": "hashed", "width": 16, "length": 4})
    config.data.image_size, config.data.batch_size, config.mesh.data = SIZE, 2, 1
    return config


if __name__ == "__main__":
    sys.exit(command_line.run(main, sys.argv))
