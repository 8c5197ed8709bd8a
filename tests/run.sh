#!/usr/bin/env bash
# Makes the environment and passes the tests: bash tests/run.sh [pytest arguments]
# Slow proofs are left out; run them with: bash tests/run.sh -m slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh test,photos
export JAX_PLATFORMS=cpu
exec "$VENV/bin/python" -m pytest -n "${TEST_PROCESSES:-2}" "$@"
