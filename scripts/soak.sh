#!/usr/bin/env bash
# Short runs, one process of each killed at a moment drawn from a seed; what they leave behind is compared with an undisturbed run.
#
#   ./scripts/soak.sh                                             30 runs, one after the other
#   ./scripts/soak.sh --runs 4 --launcher torchrun --kind rank --folder runs/few
#   ./scripts/soak.sh --launcher local torchrun --launcher ray-nodes --reference local      two runs at a time
#   ./scripts/soak.sh --conversations                            rollouts of several turns, with branches and tries that fail
#   ./scripts/soak.sh --adapters                                 low-rank adapters in place of all weights
#   ./scripts/soak.sh --network                                  nodes with networks of their own, whose links fail; as root
#
# Prints the table of docs/soak.md. Exit code 1: a run did not end well, or its ledger or weights are wrong. Logs are in --folder.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
export PYTHONPATH="$PWD" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "$python" -m tests.soak "$@"
