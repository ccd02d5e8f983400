#!/usr/bin/env bash
# Make .venv and install rlcore into it, with the extras given as arguments. Does nothing for what is already there.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/pip.sh
. scripts/pip.sh
extras=$(IFS=,; echo "$*")

[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
stamp=.venv/installed
want="$(cksum < pyproject.toml) $extras"
if ! grep -qxF "$want" "$stamp" 2> /dev/null; then
    echo "== .venv: rlcore${extras:+ with $extras}"
    # torch by exact version and in the same run, so that no other package asks the resolver for another build of it.
    pip_into .venv torch==2.13.0 --editable ".${extras:+[$extras]}"
    echo "$want" >> "$stamp"
fi
