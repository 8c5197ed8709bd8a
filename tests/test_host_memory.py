"""A process that computes on a CPU keeps what it frees, unless the user has chosen otherwise."""

import os
import subprocess
import sys

import pytest

# Pages touched anew by the third call of a program with 128 MiB of temporaries.
FAULTS = """
import resource, sys
import jax, jax.numpy as jnp
from pid_jax import host_memory
kept = host_memory.keep_freed_memory() if sys.argv[1] == "keep" else None
program = jax.jit(lambda x: jnp.sort(jnp.outer(x, x), axis=0)[7].sum())
count = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    before = count()
    jax.block_until_ready(program(jnp.arange(4096.0)))
print(kept, count() - before)
"""


def faults(word: str, **environment: str) -> tuple[str, int]:
    clean = {name: value for name, value in os.environ.items() if "MALLOC" not in name.upper()}
    done = subprocess.run([sys.executable, "-c", FAULTS, word], capture_output=True, text=True,
                          env=clean | {"JAX_PLATFORMS": "cpu"} | environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    kept, count = done.stdout.split()
    return kept, int(count)


def test_temporaries_are_not_faulted_in_again():
    kept, few = faults("keep")
    assert kept == "True"
    assert few < 1000 < 10000 < faults("as it is")[1]


@pytest.mark.parametrize("environment", [
    {"MALLOC_ARENA_MAX": "4"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"},
    {"JAX_PLATFORMS": "", "TPU_SKIP_MDS_QUERY": "1"}])
def test_settings_of_the_user_and_accelerators_are_left_alone(environment):
    assert faults("keep", **environment)[0] == "False"
