#!/usr/bin/env bash
# Trains on a Slurm cluster, one process per GPU.
#
#   NODES=2 GPUS=8 bash launch/slurm.sh [--dry-run] -- --config=configs/X.py --workdir=DIR ...
#   NAME=pid_jax bash launch/slurm.sh --list | --logs | --delete
#
# --dry-run prints the batch script and the command that submits it. Three minutes before the time
# limit, and when a job of higher priority takes the nodes, every process gets SIGTERM and saves;
# the job then goes back into the queue and continues from the newest checkpoint.
#
# Environment:
#   NAME        of the job (pid_jax)
#   NODES       (1)
#   GPUS        of each node (8)
#   CPUS        cores of each process (8)
#   TIME        limit of one turn (24:00:00)
#   PARTITION, ACCOUNT   (the cluster's default)
#   VENV        (.venv)
#   LOGS        folder of the logs, seen by all nodes (slurm_logs)
#   RESTARTS    how often it goes back into the queue (50)
#   WARNING     seconds from SIGTERM to the time limit (180)
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse "$@"
NAME="${NAME:-pid_jax}"
NODES="${NODES:-1}"
GPUS="${GPUS:-8}"
CPUS="${CPUS:-8}"
TIME="${TIME:-24:00:00}"
VENV="${VENV:-$PROJECT/.venv}"
LOGS="${LOGS:-slurm_logs}"
RESTARTS="${RESTARTS:-50}"
WARNING="${WARNING:-180}"
for variable in NODES GPUS CPUS RESTARTS WARNING; do whole_number "$variable"; done
need_command sbatch "run this on a login node of the cluster"

exports() {
  local line
  read_environment gpu
  for line in "${ENVIRONMENT[@]}"; do quoted export "$line"; done
}

options() {
  printf '#SBATCH %s\n' "--job-name=$NAME" "--nodes=$NODES" "--ntasks-per-node=$GPUS" \
    "--gpus-per-node=$GPUS" "--cpus-per-task=$CPUS" "--time=$TIME" "--requeue" \
    "--open-mode=append" "--output=$LOGS/%x-%j.log" "--signal=TERM@$WARNING"
  [ -z "${PARTITION:-}" ] || echo "#SBATCH --partition=$PARTITION"
  [ -z "${ACCOUNT:-}" ] || echo "#SBATCH --account=$ACCOUNT"
}

# jax reads Slurm's variables: the coordinator, the number of processes, and which GPU is whose.
script() {
  cat << END
#!/usr/bin/env bash
$(options)
cd $(quoted "$PROJECT")
$(exports)
srun --ntasks-per-node=1 --ntasks=$NODES $(quoted "$VENV/bin/python" -m pid_jax.check_env --platform=gpu "${TRAINER[@]}") || exit 2
srun --kill-on-bad-exit=1 --label $(quoted "$VENV/bin/python" -u -m pid_jax.main "${TRAINER[@]}")
status=\$?
case "\$status" in
  $(IFS='|'; echo "${RESTART_CODES[*]}"))
    [ "\${SLURM_RESTART_COUNT:-0}" -ge $RESTARTS ] || scontrol requeue "\$SLURM_JOB_ID" ;;
esac
exit "\$status"
END
}

case "$ACTION" in
  start) run mkdir -p "$LOGS"; run_with "$(script)" sbatch ;;
  list) run squeue --me --name="$NAME" --Format=JobID,Name,State,TimeUsed,TimeLeft,NumNodes,ReasonList ;;
  logs) run bash -c "tail -n 40 -F $(quoted "$LOGS")/$(quoted "$NAME")-*.log" ;;
  delete) run scancel --me --name="$NAME" ;;
esac
