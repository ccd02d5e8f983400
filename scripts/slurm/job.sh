# shellcheck shell=bash
# Sourced by the Slurm templates, in the checkout: $nodes are the job's, $settings the arguments of `rlcore train`.
say() { echo "${SLURM_JOB_NAME:-rlcore}: $*" >&2; }
if [ $# -eq 0 ]; then say "usage: sbatch $0 CONFIG.yaml [SERVERS.yaml] [key=value ...]"; exit 2; fi

# Further arguments of srun, which come last, and a line of shell for each task: `module load cuda`, `source env.sh`. It sees none of
# the task's arguments, and a container begins in a folder of its own. A task whose line fails ends with the line's exit code.
# shellcheck disable=SC2034     # the templates read it
read -ra srun_args <<< "${SRUN_ARGS:-}"
export PRELUDE=${PRELUDE:-:} CHECKOUT=$PWD
# shellcheck disable=SC2016,SC2034     # for the task, where the templates start it with a script and its arguments
task='run=("$@"); set --
cd "$CHECKOUT" || exit
eval "$PRELUDE" || { code=$?; echo "$(hostname): PRELUDE ended with exit code $code: $PRELUDE" >&2; exit "$code"; }
cd "$CHECKOUT" || exit
NODE_RANK=$SLURM_PROCID exec "${run[@]}"'

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes[0]}

# A job that Slurm has requeued resumes, whatever its arguments were.
settings=("$@")
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    settings=()
    for word in "$@"; do
        case $word in
            --resume) ;;
            --overwrite) say "back from the queue: what is in the run's folder is gone on with, not overwritten again" ;;
            *) settings+=("$word") ;;
        esac
    done
    settings+=(--resume)
fi

# Keys are passed on in the environment, never on a command line or in a file.
key() { head -c 32 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=\n'; }
export RLCORE_ENGINE_API_KEY=${RLCORE_ENGINE_API_KEY:-$(key)} RLCORE_ENGINE_ADMIN_KEY=${RLCORE_ENGINE_ADMIN_KEY:-$(key)}
