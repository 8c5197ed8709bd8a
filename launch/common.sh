# Shared by the launch scripts; sourced, never run. Needs bash 4.4 or newer.
#
# shellcheck shell=bash disable=SC2034

PROJECT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ACTION=start
DRY_RUN=no
TRAINER=()

# Exit statuses of pid_jax.main after which the same command goes on: 143 stopped by SIGTERM after
# saving, 75 another process was lost or does not come, 134 jax aborted because another process
# died, 137 killed. 1 (the run failed) and 2 (bad input) would only fail again.
RESTART_CODES=(75 134 137 143)

fail() { printf 'error: %s\n' "$1" >&2; exit 2; }

say() { printf '%s %s\n' "$(date +%H:%M:%S)" "$1" >&2; }

# The comment at the head of the script that was called.
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }

# Reads [--dry-run] [--list|--logs|--delete|--help] [-- FLAGS OF pid_jax.main].
parse() {
  while [ $# -gt 0 ]; do
    case "$1" in
      --dry-run) DRY_RUN=yes ;;
      --list | --logs | --delete) ACTION="${1#--}" ;;
      --help | -h) usage; exit 0 ;;
      --) shift; TRAINER=("$@"); break ;;
      *) fail "$1 is not an option of $(basename "$0"); flags of the training come after --" ;;
    esac
    shift
  done
  [ "$ACTION" != start ] || check_trainer
}

# A start needs the two flags without which pid_jax.main does nothing.
check_trainer() {
  local flag
  for flag in --config --workdir; do
    [ -n "$(trainer_flag "$flag")" ] || fail "the training flag $flag=... is missing; expected: \
$(basename "$0") -- --config=configs/X.py --workdir=DIR"
  done
}

# The value of a flag of the training: trainer_flag --workdir
trainer_flag() {
  local argument
  for argument in "${TRAINER[@]}"; do
    case "$argument" in "$1"=*) printf '%s' "${argument#*=}"; return ;; esac
  done
}

# The folder of the run: --workdir of the training, else WORKDIR.
run_folder() {
  local folder
  folder="$(trainer_flag --workdir)"
  printf '%s' "${folder:-${WORKDIR:-}}"
}

# Runs a command; under --dry-run prints it, quoted so that a shell would read the same words.
run() {
  if [ "$DRY_RUN" = yes ]; then quoted "$@"; else "$@"; fi
}

# The same with text on its standard input: run_with TEXT COMMAND...
run_with() {
  local text="$1"
  shift
  if [ "$DRY_RUN" = yes ]; then
    printf "%s <<'END'\n%s\nEND\n" "$(quoted "$@")" "$text"
  else
    "$@" <<< "$text"
  fi
}

# One line of words, quoted for a shell.
quoted() {
  local words
  printf -v words '%q ' "$@"
  printf '%s\n' "${words% }"
}

# need VARIABLE WHAT: a setting without which nothing can start.
need() { [ -n "${!1:-}" ] || fail "$1 is not set: $2"; }

# whole_number VARIABLE: refuses anything else.
whole_number() {
  [[ "${!1}" =~ ^[1-9][0-9]*$ ]] || fail "$1 is '${!1}'; expected a whole number above 0"
}

# need_command NAME HINT: refuses a machine that lacks a program; a dry run needs none.
need_command() {
  [ "$DRY_RUN" = yes ] || command -v "$1" > /dev/null || fail "there is no command $1; $2"
}

# check PLATFORM: whether this machine can do what the training's flags ask for, unless CHECK is no.
check() {
  [ "${CHECK:-yes}" = yes ] || return 0
  read_environment "$1"
  run env -C "$PROJECT" "${ENVIRONMENT[@]}" "$VENV/bin/python" -m pid_jax.check_env \
    --platform="$1" "${TRAINER[@]}"
}

# Whether the same command goes on after this exit status.
restartable() {
  local code
  for code in "${RESTART_CODES[@]}"; do [ "$1" != "$code" ] || return 0; done
  return 1
}

# environment_for cpu|tpu|gpu: NAME=VALUE lines that every process of a run gets. What is set
# already stays as it is.
environment_for() {
  # Compiled programs outlive a restart: the first step then comes in seconds.
  setting JAX_COMPILATION_CACHE_DIR "$HOME/.cache/pid_jax/compiled"
  # The default logs every warning of XLA's C++; errors stay.
  setting TF_CPP_MIN_LOG_LEVEL 2
  case "$1" in
    cpu) setting JAX_PLATFORMS cpu ;;
    # Fail where the chips are missing, instead of training on the host's CPU.
    tpu) setting JAX_PLATFORMS tpu,cpu; setting LIBTPU_INIT_ARGS "$(tpu_flags)" ;;
    gpu)
      setting JAX_PLATFORMS cuda,cpu
      setting XLA_FLAGS "$(gpu_flags)"
      # The default leaves a quarter of the card unused; NCCL and cuDNN need some outside the pool.
      setting XLA_PYTHON_CLIENT_MEM_FRACTION 0.92 ;;
  esac
}

setting() { printf '%s=%s\n' "$1" "${!1:-$2}"; }

# Why: gathers of divided parameters (mesh.fsdp) and the all-to-alls of divided tokens
# (mesh.sequence) run beside the matrix products instead of between them.
tpu_flags() {
  local flags=(--xla_tpu_enable_async_collective_fusion=true
    --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true
    --xla_tpu_overlap_compute_collective_tc=true
    --xla_enable_async_all_gather=true)
  echo "${flags[*]}"
}

# Why: the same overlap on GPUs, and a collective that has not ended after ten minutes ends the
# process with a message instead of spinning.
gpu_flags() {
  local flags=(--xla_gpu_enable_latency_hiding_scheduler=true
    --xla_gpu_nccl_termination_timeout_seconds=600)
  echo "${flags[*]}"
}

# The environment as words for `env`, into the array ENVIRONMENT.
read_environment() { mapfile -t ENVIRONMENT < <(environment_for "$1"); }
