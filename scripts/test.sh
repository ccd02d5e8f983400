#!/usr/bin/env bash
# Every check: lint, format, types, import contracts, then tests, quick ones first.
#   ./scripts/test.sh [pytest arguments]            every capability once, with its real parts
#   ./scripts/test.sh --rest [pytest arguments]     the other tests that CI runs
#   ./scripts/test.sh --full [pytest arguments]     everything, and new examples for the properties
# WORKERS=N runs tests in N processes (default: 2).
set -euo pipefail
cd "$(dirname "$0")/.."

options=(-m "not rest and not full") checks=yes
case "${1:-}" in
    --rest) shift; options=(-m "rest and not full") checks= ;;     # the first half has made the others
    --full) shift; options=(-m "" --hypothesis-profile=default) ;;
esac

# Ranks are processes: one thread each keeps them from fighting over the cores. Nothing may be fetched while testing.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline
export PYTHONDONTWRITEBYTECODE=""      # what is imported is compiled once, not in each of the processes

step() {    # step NAME COMMAND...
    local name=$1 from=$SECONDS
    shift
    echo "== $name"
    "$@"
    echo "   $((SECONDS - from)) s"
}

step install ./scripts/install.sh dev ray tensorboard wandb plot smollm2
step engine ./scripts/install_sglang.sh
step chromium ./scripts/install_chromium.sh
step bubblewrap ./scripts/install_debian.sh bubblewrap bwrap
if [ "${options[1]}" = "" ] && [ "$(id -u)" = 0 ]; then      # tests/network needs root; it names what it skips
    step slurm ./scripts/install_debian.sh slurm-wlm slurmctld
fi
if [ -z "$checks" ] || [ "${options[1]}" = "" ]; then step verifiers ./scripts/install_verifiers.sh; fi     # of those tests alone
PATH="$PWD/.venv/bin:$PATH"
if [ -n "$checks" ]; then
    step lint ruff check .
    step format ruff format --check .
    step types mypy
    step contracts lint-imports
fi
echo "== tests"
exec python -m pytest -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder "${options[@]}" "$@"
