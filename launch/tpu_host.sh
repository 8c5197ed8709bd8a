#!/usr/bin/env bash
# Runs on every host of a Cloud TPU slice, started by launch/tpu_pod.sh: finds out which host it is
# and trains under launch/supervise.sh.
#
#   bash launch/tpu_host.sh [--dry-run] FLAGS OF pid_jax.main
#
# Writes the supervisor's process id to train.pid (SIGTERM ends the training after a save) and the
# exit status to train.status when the training is over. A dry run prints the command.
#
# Environment: METADATA (the platform's server; http://metadata.google.internal), PORT (29400).
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$PROJECT"
[ "${1:-}" != --dry-run ] || { DRY_RUN=yes; shift; }
METADATA="${METADATA:-http://metadata.google.internal}/computeMetadata/v1/instance"
PORT="${PORT:-29400}"

attribute() { curl -sf -m 10 -H 'Metadata-Flavor: Google' "$METADATA/$1"; }

# Endpoints look like id:port:address,id:port:address,... in the order of the hosts.
endpoints="$(attribute attributes/worker-network-endpoints)" \
  || fail "the metadata server does not say which hosts the slice has; is this a TPU VM?"
IFS=, read -r -a hosts <<< "$endpoints"
IFS=: read -r -a first <<< "${hosts[0]}"
read_environment tpu
command=(env "${ENVIRONMENT[@]}" "NOTICE_URL=$METADATA/preempted")
if [ "${#hosts[@]}" -gt 1 ]; then
  command+=("PID_JAX_COORDINATOR=${first[2]}:$PORT" "PID_JAX_PROCESSES=${#hosts[@]}"
    "PID_JAX_PROCESS=$(attribute attributes/agent-worker-number)")
fi
command+=(bash launch/supervise.sh .venv/bin/python -u -m pid_jax.main "$@")
if [ "$DRY_RUN" = yes ]; then
  quoted "${command[@]}"
  exit
fi
rm -f train.status
"${command[@]}" &
echo $! > train.pid
status=0
wait $! || status=$?
echo "$status" > train.status
