#!/usr/bin/env bash
# Trains on one machine: CPU, one or several GPUs, or a TPU VM of one host. One process.
#
#   bash launch/single_host.sh [--dry-run] -- --config=configs/X.py --workdir=DIR ...
#   WORKDIR=DIR bash launch/single_host.sh --list | --logs | --delete
#
# --dry-run prints what would run; --list says whether a run is at work; --logs follows its log;
# --delete stops it (SIGTERM: it saves first). Checkpoints are never deleted.
#
# The run starts again when it was interrupted (launch/supervise.sh). Its output is in
# DIR/launch.log, its process id in DIR/launch.pid.
#
# Environment: PLATFORM (cpu, gpu or tpu; default: what the machine shows), VENV (.venv),
# CHECK (yes: pid_jax.check_env before the start), and the flags of launch/common.sh.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse "$@"
VENV="${VENV:-$PROJECT/.venv}"
WORKDIR="$(run_folder)"

guess_platform() {
  if [ -e /dev/nvidia0 ]; then echo gpu; elif compgen -G '/dev/accel*' > /dev/null; then echo tpu
  elif compgen -G '/dev/vfio/[0-9]*' > /dev/null; then echo tpu; else echo cpu; fi
}

running() { [ -s "$WORKDIR/launch.pid" ] && kill -0 "$(< "$WORKDIR/launch.pid")" 2> /dev/null; }

start() {
  local platform="${PLATFORM:-$(guess_platform)}"
  check "$platform"
  read_environment "$platform"
  local command=(env -C "$PROJECT" "${ENVIRONMENT[@]}" bash launch/supervise.sh
    "$VENV/bin/python" -u -m pid_jax.main "${TRAINER[@]}")
  if [ "$DRY_RUN" = yes ]; then
    quoted nohup "${command[@]}"
    return
  fi
  ! running || fail "a run is at work in $WORKDIR (process $(< "$WORKDIR/launch.pid"))"
  mkdir -p "$WORKDIR"
  nohup "${command[@]}" >> "$WORKDIR/launch.log" 2>&1 &
  echo $! > "$WORKDIR/launch.pid"
  say "started process $!; its output is in $WORKDIR/launch.log"
}

need WORKDIR "the folder of the run"
case "$ACTION" in
  start) start ;;
  list) if running; then echo "running: process $(< "$WORKDIR/launch.pid")"; else echo "no run in $WORKDIR"; fi ;;
  logs) run tail -n 40 -F "$WORKDIR/launch.log" ;;
  delete) running || fail "no run in $WORKDIR"; run kill -TERM "$(< "$WORKDIR/launch.pid")" ;;
esac
