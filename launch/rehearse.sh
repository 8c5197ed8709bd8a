#!/usr/bin/env bash
# Rehearses a pod on one machine: several processes of CPU devices train as one run.
#
#   bash launch/rehearse.sh [--dry-run] -- --config=configs/quickstart_pid.py --workdir=DIR ...
#   WORKDIR=DIR bash launch/rehearse.sh --list | --logs | --delete
#
# --dry-run prints the command of every process; --list shows those at work; --logs follows their
# logs; --delete sends SIGTERM to one of them, and all save and stop. The script waits for the end
# and exits with the status of the run; an interrupted one starts again as a whole, as a pod does.
#
# Environment: PROCESSES (2), DEVICES of each (4), PORT of the coordinator (29400), VENV (.venv),
# RESTARTS (3), CHECK (yes: pid_jax.check_env before the start). Logs are in
# DIR/rehearsal/process_<i>.log.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse "$@"
PROCESSES="${PROCESSES:-2}"
DEVICES="${DEVICES:-4}"
PORT="${PORT:-29400}"
RESTARTS="${RESTARTS:-3}"
VENV="${VENV:-$PROJECT/.venv}"
WORKDIR="$(run_folder)"
for variable in PROCESSES DEVICES PORT; do whole_number "$variable"; done
need WORKDIR "the folder of the run"
LOGS="$WORKDIR/rehearsal"
PIDS=()

# The words of process i's command, into COMMAND.
command_of() {
  read_environment cpu
  COMMAND=(env -C "$PROJECT" "${ENVIRONMENT[@]}"
    "XLA_FLAGS=${XLA_FLAGS:+$XLA_FLAGS }--xla_force_host_platform_device_count=$DEVICES"
    "PID_JAX_COORDINATOR=127.0.0.1:$PORT" "PID_JAX_PROCESSES=$PROCESSES" "PID_JAX_PROCESS=$1"
    "$VENV/bin/python" -u -m pid_jax.main "${TRAINER[@]}")
}

start_all() {
  local i
  PIDS=()
  mkdir -p "$LOGS"
  : > "$LOGS/pids"
  for ((i = 0; i < PROCESSES; i++)); do
    command_of "$i"
    "${COMMAND[@]}" >> "$LOGS/process_$i.log" 2>&1 &
    PIDS+=($!)
    echo $! >> "$LOGS/pids"
  done
}

# Waits for all. A failure that lasts is the run's status before one that only interrupted it: when
# one process fails, jax aborts the others.
wait_for_all() {
  local pid code
  status=0
  for pid in "${PIDS[@]}"; do
    code=0
    wait "$pid" || code=$?
    if [ "$status" = 0 ] || { [ "$code" != 0 ] && ! restartable "$code"; }; then status="$code"; fi
  done
}

start() {
  local i again
  check cpu
  if [ "$DRY_RUN" = yes ]; then
    for ((i = 0; i < PROCESSES; i++)); do command_of "$i"; quoted "${COMMAND[@]}"; done
    return
  fi
  trap 'kill -TERM "${PIDS[@]}" 2> /dev/null; RESTARTS=0' TERM INT
  for ((again = 0; ; again++)); do
    say "$PROCESSES processes of $DEVICES devices; logs in $LOGS"
    start_all
    wait_for_all
    if ! restartable "$status" || [ "$again" -ge "$RESTARTS" ]; then break; fi
    say "status $status: all processes again ($((again + 1)) of $RESTARTS)"
  done
  rm -f "$LOGS/pids"
  tail -n 3 "$LOGS"/process_*.log
  exit "$status"
}

at_work() {
  local pid
  [ -e "$LOGS/pids" ] || return 0
  while read -r pid; do ! kill -0 "$pid" 2> /dev/null || echo "$pid"; done < "$LOGS/pids"
}

case "$ACTION" in
  start) start ;;
  list) at_work ;;
  logs) run tail -n 40 -F "$LOGS"/process_*.log ;;
  delete)
    mapfile -t pids < <(at_work)
    [ "${#pids[@]}" -gt 0 ] || fail "no process of a rehearsal in $WORKDIR is at work"
    run kill -TERM "${pids[0]}" ;;
esac
