#!/usr/bin/env bash
# Trains on a Cloud TPU slice of one or many hosts through a queued resource.
#
#   NAME=run ZONE=us-west4-a bash launch/tpu_pod.sh [--dry-run] -- --config=configs/X.py --workdir=DIR ...
#   NAME=run ZONE=us-west4-a bash launch/tpu_pod.sh --list | --logs | --delete
#
# A start asks for the slice (unless it exists), waits for it, copies this repository's last commit
# to every host, makes the environment, checks it (pid_jax.check_env) and trains on all hosts. It
# then watches: when the slice is taken away it is asked for again, and the run goes on; when one
# host fails for good, all end. Stop the watching with Ctrl-C; the training does not mind. --delete
# gives the slice back.
#
# DIR must be one folder for all hosts (Filestore, or a mounted bucket), or a local one together
# with --config.checkpoint.folder=gs://BUCKET/RUN.
#
# Environment:
#   NAME, ZONE        of the queued resource and its node (no default)
#   ACCELERATOR       v5litepod-16, v5p-32, v6e-64, ... (v5litepod-16)
#   RUNTIME           software of the hosts (v2-alpha-tpuv5-lite)
#   PROVISIONING      spot, on-demand or reserved (spot)
#   PROJECT_ID        of the cloud project (gcloud's own)
#   WATCH             yes: ask again when the slice is lost (yes)
#   REMOTE            folder on the hosts (pid_jax)
#   PREPARE           a command that runs on every host first, such as a mount (none)
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse "$@"
ACCELERATOR="${ACCELERATOR:-v5litepod-16}"
RUNTIME="${RUNTIME:-v2-alpha-tpuv5-lite}"
PROVISIONING="${PROVISIONING:-spot}"
WATCH="${WATCH:-yes}"
REMOTE="${REMOTE:-pid_jax}"
need NAME "a name for the slice"
need ZONE "a zone that has $ACCELERATOR"
need_command gcloud "install the Google Cloud CLI and log in"
PLACE=(--zone="$ZONE")
[ -z "${PROJECT_ID:-}" ] || PLACE+=(--project="$PROJECT_ID")
case "$PROVISIONING" in
  spot | reserved) KIND=("--$PROVISIONING") ;;
  on-demand) KIND=() ;;
  *) fail "PROVISIONING is '$PROVISIONING'; expected spot, on-demand or reserved" ;;
esac
TPUS=(gcloud compute tpus)

state() {
  "${TPUS[@]}" queued-resources describe "$NAME" "${PLACE[@]}" \
    --format='value(state.state)' 2> /dev/null || echo MISSING
}

create() {
  run "${TPUS[@]}" queued-resources create "$NAME" --node-id="$NAME" "${PLACE[@]}" \
    --accelerator-type="$ACCELERATOR" --runtime-version="$RUNTIME" "${KIND[@]}"
}

delete() { run "${TPUS[@]}" queued-resources delete "$NAME" "${PLACE[@]}" --force --quiet; }

# on_all COMMAND: the same command line on every host.
on_all() {
  run "${TPUS[@]}" tpu-vm ssh "$NAME" "${PLACE[@]}" --worker=all --command="$1"
}

# Asks for the slice until it is there; a lost one is given back first.
acquire() {
  if [ "$DRY_RUN" = yes ]; then
    create
    return
  fi
  local now before=''
  while true; do
    now="$(state)"
    [ "$now" = "$before" ] || say "$NAME: $now"
    before="$now"
    case "$now" in
      ACTIVE) return ;;
      MISSING) create ;;
      FAILED | SUSPENDED) delete ;;
    esac
    sleep 30
  done
}

install() {
  local archive="/tmp/$NAME.tar.gz"
  run git -C "$PROJECT" archive --format=tar.gz -o "$archive" HEAD &&
  run "${TPUS[@]}" tpu-vm scp "$archive" "$NAME:$NAME.tar.gz" "${PLACE[@]}" --worker=all &&
  on_all "mkdir -p $REMOTE && tar -xzf $NAME.tar.gz -C $REMOTE && cd $REMOTE && ${PREPARE:-true} \
&& bash launch/environment.sh tpu"
}

# Detached, so that it outlives the connection; launch/tpu_host.sh says who is who.
train() {
  local words
  words="$(quoted "${TRAINER[@]}")"
  on_all "cd $REMOTE && .venv/bin/python -m pid_jax.check_env --platform=tpu $words \
&& { nohup bash launch/tpu_host.sh $words > train.log 2>&1 < /dev/null & }"
}

# The exit statuses of the hosts whose training is over, one a line.
statuses() {
  "${TPUS[@]}" tpu-vm ssh "$NAME" "${PLACE[@]}" --worker=all \
    --command="cat $REMOTE/train.status 2> /dev/null || true" 2> /dev/null
}

# Where one host failed for good the others would start again and again without it.
stop_all() { on_all "cd $REMOTE && kill -TERM \$(cat train.pid) 2> /dev/null || true"; }

# 0: the run is done. 1: it failed on a host. 2: it was interrupted or the slice was lost.
watch() {
  local ended code polls=0
  while sleep 60; do
    [ "$(state)" = ACTIVE ] || { say "$NAME: $(state)"; return 2; }
    ended="$(statuses)" || continue
    [ -n "$ended" ] || continue
    grep -qv '^0$' <<< "$ended" || { say "training ended with status 0"; return 0; }
    for code in $ended; do
      if [ "$code" != 0 ] && ! restartable "$code"; then
        say "training ended with status $code"
        stop_all
        return 1
      fi
    done
    # Interrupted: the platform is about to take the slice. Where it does not, the run goes on there.
    polls=$((polls + 1))
    [ "$polls" -lt 5 ] || { say "training was interrupted"; return 2; }
  done
}

start() {
  local lost
  while true; do
    acquire
    if ! { install && train; }; then
      [ "$DRY_RUN" = no ] && [ "$(state)" != ACTIVE ] || return 1
      continue
    fi
    [ "$DRY_RUN" = no ] && [ "$WATCH" = yes ] || return 0
    lost=0
    watch || lost=$?
    [ "$lost" = 2 ] || return "$lost"
  done
}

case "$ACTION" in
  start) start ;;
  list) run "${TPUS[@]}" queued-resources list "${PLACE[@]}" ;;
  logs) on_all "tail -n 40 $REMOTE/train.log" ;;
  delete) delete ;;
esac
