#!/usr/bin/env bash
# The main job, from a bare clone to finished pictures: makes the environment, packs real
# photographs, trains a tiny PiD teacher on them, and decodes photographs that it never saw.
#
#   bash launch/quickstart.sh [WORKDIR]     WORKDIR: default runs/quickstart
#
# Running it again goes on where it was interrupted. Two CPU cores: under ten minutes in all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
workdir="${1:-runs/quickstart}"
source launch/environment.sh test,photos
python="$VENV/bin/python"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"

step() { printf '\n[%d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$1"; }

step "packing photographs"
[ -e "$workdir/photos" ] || "$python" -m pid_jax.data.photos --dst "$workdir/photos"

step "training; the log is also in $workdir/log.txt"
"$python" -m pid_jax.main --config=configs/quickstart_pid.py --workdir="$workdir" \
  --config.data.path="$workdir/photos/train" --config.sample.heldout="$workdir/photos/heldout"

step "decoding photographs held out of training"
"$python" -m pid_jax.decode --checkpoint "$workdir" --out "$workdir/decoded" \
  --input "$workdir/photos/heldout" --ground_truth --size 256x256 --untrained

step "done"
echo "pictures (LQ bicubic | PiD | untrained | truth): $workdir/decoded/grid.png"
echo "scores:                                          $workdir/decoded/metrics.json"
echo "loss curve:                                      $workdir/plots/training.png"
