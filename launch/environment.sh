#!/usr/bin/env bash
# Makes the project's virtual environment with the locked versions, or finds it made.
#
#   source launch/environment.sh [EXTRAS]     EXTRAS: a comma list, default "test,photos"
#
# Environment: PYTHON (default: the first of python3, python3.13, python3.12, python3.11 that is
# 3.11 or newer), VENV (default: .venv in the project's folder). Sets and exports VENV.
set -euo pipefail
PROJECT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export VENV="${VENV:-$PROJECT/.venv}"
EXTRAS="${1:-test,photos}"

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
        2>/dev/null; then
      echo "$candidate"; return
    fi
  done
  echo "error: no Python 3.11 or newer on PATH; install one or set PYTHON" >&2
  return 2
}

# Python 3.11 takes the locked versions; newer Pythons take the newest that pyproject.toml admits
# only where LOCK=none says so.
constraints() { [ "${LOCK:-constraints.txt}" = none ] || echo "-c $PROJECT/constraints.txt"; }

python="$(find_python)"
stamp="$(cat "$PROJECT/pyproject.toml" "$PROJECT/constraints.txt" | cksum) $EXTRAS ${LOCK:-}"
if [ "$(cat "$VENV/.stamp" 2>/dev/null)" != "$stamp" ]; then
  echo "making the environment in $VENV with $("$python" --version)"
  "$python" -m venv --clear "$VENV"
  # shellcheck disable=SC2046
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
    $(constraints) -e "${PROJECT}[$EXTRAS]"
  echo "$stamp" > "$VENV/.stamp"
fi
