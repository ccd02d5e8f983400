#!/usr/bin/env bash
# Every check: lint, types, import contracts, then all tests in one pytest run, quick ones first, real SGLang last.
#   ./scripts/test.sh [--full] [pytest arguments]      --full adds the tests marked "full"
set -euo pipefail
cd "$(dirname "$0")/.."
options=(-m "not full")
if [ "${1:-}" = --full ]; then      # and new examples for the properties
    shift
    options=(-m "" --hypothesis-profile=default)
fi

# Ranks are processes: one thread each keeps them from fighting over the cores. Nothing may be fetched while testing.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline

step() {    # step NAME COMMAND...
    local name=$1 from=$SECONDS
    shift
    echo "== $name"
    "$@"
    echo "   $((SECONDS - from)) s"
}

step install ./scripts/install.sh dev ray tensorboard wandb plot
step engine ./scripts/install_sglang.sh
PATH="$PWD/.venv/bin:$PATH"
step lint ruff check .
step types mypy
step contracts lint-imports
echo "== tests"
python -m pytest "${options[@]}" "$@"
