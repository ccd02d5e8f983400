#!/usr/bin/env bash
# Make .venv and install rlcore into it, with the extras given as arguments. Does nothing for what is already there.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=$(IFS=,; echo "$*")

[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
# torch first and by exact version, so that no other package asks the resolver for another build of it.
.venv/bin/python -c 'import torch' 2>/dev/null || .venv/bin/pip install --quiet torch==2.13.0
stamp=.venv/installed
want="$(cat pyproject.toml | cksum) $extras"
if ! grep -qxF "$want" "$stamp" 2>/dev/null; then
    .venv/bin/pip install --quiet --editable ".${extras:+[$extras]}"
    echo "$want" >> "$stamp"
fi
