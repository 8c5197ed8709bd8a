#!/usr/bin/env bash
# Trains on a TPU slice of a GKE cluster as a JobSet.
#
#   NAME=run IMAGE=REGISTRY/pid_jax:tpu bash launch/gke.sh [--dry-run] -- --config=configs/X.py --workdir=DIR ...
#   NAME=run bash launch/gke.sh --list | --logs | --delete
#
# --dry-run prints the manifest and the command that applies it. kubectl must point at the cluster,
# which needs JobSet (https://jobset.sigs.k8s.io) and a node pool of the slice. A pod that is
# evicted (SIGTERM: it saves) or dies makes JobSet start all pods again, which go on from the newest
# checkpoint. Every pod looks at its machine first (pid_jax.check_env); what is missing or a run that
# failed (status 1), or bad input (2), ends the JobSet.
#
# Environment:
#   NAME          of the JobSet (no default; lower case, digits, -)
#   IMAGE         made from launch/containers/tpu.Dockerfile (no default)
#   ACCELERATOR   label of the nodes (tpu-v5-lite-podslice)
#   TOPOLOGY      of the slice (4x4)
#   HOSTS         machines of the slice (4)
#   CHIPS         of each machine (4)
#   SPOT          yes: only on spot nodes (no)
#   RESTARTS      (50)
#   GRACE         seconds from SIGTERM to SIGKILL (180; GKE cuts it short on spot nodes)
#   CLAIM         persistent volume claim that holds data and workdir, mounted at /data (pid-jax)
#   NAMESPACE     (default)
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse "$@"
ACCELERATOR="${ACCELERATOR:-tpu-v5-lite-podslice}"
TOPOLOGY="${TOPOLOGY:-4x4}"
HOSTS="${HOSTS:-4}"
CHIPS="${CHIPS:-4}"
SPOT="${SPOT:-no}"
RESTARTS="${RESTARTS:-50}"
GRACE="${GRACE:-180}"
CLAIM="${CLAIM:-pid-jax}"
NAMESPACE="${NAMESPACE:-default}"
need NAME "a name for the JobSet"
[[ "$NAME" =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || fail "NAME is '$NAME'; expected lower case letters, digits and -"
[[ "$TOPOLOGY" =~ ^[0-9]+(x[0-9]+)+$ ]] || fail "TOPOLOGY is '$TOPOLOGY'; expected a shape such as 4x4"
for variable in HOSTS CHIPS RESTARTS GRACE; do whole_number "$variable"; done
(($((${TOPOLOGY//x/*})) == HOSTS * CHIPS)) \
  || fail "TOPOLOGY $TOPOLOGY has $((${TOPOLOGY//x/*})) chips, HOSTS x CHIPS is $((HOSTS * CHIPS)); make them equal"
need_command kubectl "install it and point it at the cluster"
KUBECTL=(kubectl --namespace="$NAMESPACE")

# A YAML string in single quotes.
yaml() { printf "'%s'" "${1//\'/\'\'}"; }

arguments() {
  local argument
  for argument in "${TRAINER[@]}"; do printf '\n            - %s' "$(yaml "$argument")"; done
}

variables() {
  local line
  while IFS= read -r line; do
    printf '\n            - {name: %s, value: %s}' "${line%%=*}" "$(yaml "${line#*=}")"
  done < <(HOME=/data environment_for tpu)
}

spot_selector() {
  [ "$SPOT" != yes ] || printf '\n              cloud.google.com/gke-spot: "true"'
}

manifest() {
  cat << END
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $NAME
  annotations:
    # All pods of the job on one slice, which no other job shares.
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: $RESTARTS
    rules:
    - {name: lasting, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}
  replicatedJobs:
  - name: slice
    replicas: 1
    template:
      spec:
        parallelism: $HOSTS
        completions: $HOSTS
        completionMode: Indexed
        # One lost pod makes the whole job start again: its processes are one program.
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes: {containerName: train, operator: In, values: [1, 2]}
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: $GRACE
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: $ACCELERATOR
              cloud.google.com/gke-tpu-topology: $TOPOLOGY$(spot_selector)
            containers:
            - name: train
              image: $IMAGE
              command:
              - bash
              - -c
              # Python takes the shell's place, so that SIGTERM reaches it.
              - 'python -m pid_jax.check_env --platform=tpu "\$@" && exec python -u -m pid_jax.main "\$@"'
              - train
              args:$(arguments | sed 's/^            /              /')
              env:$(variables | sed 's/^            /              /')
              resources:
                limits: {google.com/tpu: $CHIPS}
              volumeMounts:
              - {name: data, mountPath: /data}
            volumes:
            - name: data
              persistentVolumeClaim: {claimName: $CLAIM}
END
}

start() {
  need IMAGE "an image made from launch/containers/tpu.Dockerfile"
  run_with "$(manifest)" "${KUBECTL[@]}" apply -f -
}

case "$ACTION" in
  start) start ;;
  list) run "${KUBECTL[@]}" get jobset,pods ;;
  logs) run "${KUBECTL[@]}" logs --selector="jobset.sigs.k8s.io/jobset-name=$NAME" --prefix --tail=40 --max-log-requests="$HOSTS" --follow ;;
  delete) run "${KUBECTL[@]}" delete jobset "$NAME" ;;
esac
