"""Every test runs in float32 with exact matmuls on the CPU unless it says otherwise."""

import itertools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the tests' time is compilation of tiny programs; this takes a third of it away.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# What tests compile goes to a folder that was asked for, never to the user's.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")

import jax
import pytest

jax.config.update("jax_default_matmul_precision", "highest")

# A process that keeps what all tests compiled grows to several GiB.
TESTS_BETWEEN_CLEARINGS = 40
_finished = itertools.count(1)


@pytest.fixture(autouse=True)
def forget_old_compilations():
    """Frees compiled functions now and then."""
    yield
    if next(_finished) % TESTS_BETWEEN_CLEARINGS == 0:
        jax.clear_caches()


@pytest.fixture(scope="session")
def pid_checkpoint(tmp_path_factory):
    """Workdir of a tiny PiD checkpoint with random weights."""
    from tests import drawing
    return drawing.write_checkpoint(tmp_path_factory.mktemp("pid"), "pid_teacher")


@pytest.fixture(scope="session")
def t2i_checkpoint(tmp_path_factory):
    """Workdir of a tiny text-to-image checkpoint with random weights."""
    from tests import drawing
    return drawing.write_checkpoint(tmp_path_factory.mktemp("t2i"), "pixeldit_t2i")


@pytest.fixture(scope="session")
def decoder(pid_checkpoint):
    """A decoder that keeps its compiled functions over all tests."""
    from pid_jax.inference import PixelDecoder
    return PixelDecoder.from_checkpoint(pid_checkpoint)


@pytest.fixture(scope="session")
def generator(t2i_checkpoint):
    """A generator that keeps its compiled functions over all tests."""
    from pid_jax.inference import PixelGenerator
    return PixelGenerator.from_checkpoint(t2i_checkpoint)
