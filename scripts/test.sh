#!/usr/bin/env bash
# Every check: lint, types, import contracts, then all tests in one pytest run, quick ones first, real SGLang last.
#   ./scripts/test.sh [--full] [pytest arguments]      --full adds the tests marked "full"; without arguments it runs two folders at a time
set -euo pipefail
cd "$(dirname "$0")/.."
options=(-m "not full") beside=()
if [ "${1:-}" = --full ]; then      # and new examples for the properties
    shift
    options=(-m "" --hypothesis-profile=default)
    if [ $# -eq 0 ]; then       # most of their time they wait, for processes to start, to end, to be missed
        beside=(tests/parity tests/ray tests/sglang)
        set -- tests/unit tests/checkpoint tests/integration
    fi
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
if [ ${#beside[@]} -eq 0 ]; then
    echo "== tests"
    exec python -m pytest "${options[@]}" "$@"
fi

log=$(mktemp)
set -m      # a job of its own hears Ctrl-C as any other; else it, and all that it starts, would ignore it
python -m pytest "${options[@]}" "${beside[@]}" > "$log" 2>&1 < /dev/null &
other=$! failed=0
set +m
trap '{ kill -INT -- "-$other" && wait "$other"; } 2> /dev/null || :; rm -f "$log"' EXIT
echo "== tests: $*"
python -m pytest "${options[@]}" "$@" || failed=$?
[ "$failed" -ne 2 ] || exit 2       # interrupted
wait "$other" || failed=$?
echo "== tests: ${beside[*]}, meanwhile"
cat "$log"
exit "$failed"
