#!/usr/bin/env bash
# Runs a training command on one host and runs it again when it was interrupted.
#
#   bash launch/supervise.sh COMMAND...
#
# After the exit statuses 75, 134, 137 and 143 (see launch/common.sh) the command starts again and
# goes on from its newest checkpoint; after any other it is over, with that status. SIGTERM and
# SIGINT go on to the command, which saves; nothing starts again then.
#
# Environment:
#   RESTARTS        how often at most (default 50)
#   RESTART_PAUSE   seconds before each (default 15)
#   SHORT           a run of fewer seconds counts as short (default 60); three short ones in a row
#                   are the last
#   NOTICE_URL      asked every NOTICE_PAUSE seconds (5); when it answers TRUE, the platform is about
#                   to take the machine and the command gets SIGTERM (default: none)
set -uo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
RESTARTS="${RESTARTS:-50}"
RESTART_PAUSE="${RESTART_PAUSE:-15}"
SHORT="${SHORT:-60}"
[ $# -gt 0 ] || { usage; exit 2; }

child='' stopping=no signalled=no
pass_on() {
  stopping=yes signalled=yes
  [ -z "$child" ] || kill -TERM "$child" 2> /dev/null
}
trap pass_on TERM INT

# A trap ends `wait` early; only without a signal is its status the command's.
wait_for_child() {
  while true; do
    signalled=no
    wait "$child"
    code=$?
    [ "$signalled" = yes ] || return
  done
}

watch_for_notice() {
  while sleep "${NOTICE_PAUSE:-5}"; do
    if [ "$(curl -s -m 4 -H 'Metadata-Flavor: Google' "$NOTICE_URL")" = TRUE ]; then
      say "the platform takes this machine: SIGTERM to the training"
      kill -TERM "$1"
      return
    fi
  done
}

notice=''
if [ -n "${NOTICE_URL:-}" ]; then
  watch_for_notice $$ &
  notice=$!
fi
finish() { [ -z "$notice" ] || kill "$notice" 2> /dev/null; exit "$1"; }

short=0
for ((again = 0; ; again++)); do
  [ "$stopping" = no ] || finish 143
  began=$SECONDS
  "$@" &
  child=$!
  wait_for_child
  restartable "$code" && [ "$stopping" = no ] || finish "$code"
  short=$((SECONDS - began < SHORT ? short + 1 : 0))
  if [ "$again" -ge "$RESTARTS" ] || [ "$short" -ge 3 ]; then
    say "status $code after $((SECONDS - began)) s; not started again ($again restarts, $short short runs in a row)"
    finish "$code"
  fi
  say "status $code: the same command again in $RESTART_PAUSE s ($((again + 1)) of $RESTARTS)"
  sleep "$RESTART_PAUSE" &
  child=$!
  wait "$child"
done
