#!/usr/bin/env bash
# Make .venv-verifiers, an environment of its own for the workflow `verifiers`: the package pins openai and mcp.
#   ./scripts/install_verifiers.sh        360 MB, one to two minutes
# PYTHON chooses the interpreter, 3.11 or later. Does nothing where the same version is already installed. Your own
# environments go there too: .venv-verifiers/bin/pip install ...
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/pip.sh
. scripts/pip.sh
venv=.venv-verifiers want="verifiers==0.4.0"
fail() { echo "install_verifiers: $*" >&2; exit 1; }
if [ $# -gt 0 ]; then echo "usage: install_verifiers.sh; got: $*" >&2; exit 2; fi

# The stamp is written last: a half-made environment has none. One whose interpreter has gone does not run.
if [ "$(cat "$venv/installed" 2>/dev/null)" = "$want" ] && "$venv/bin/python" -c '' 2>/dev/null; then exit 0; fi
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is $("$python" -V 2>&1), expected Python 3.11 or later; set PYTHON"
rm -rf "$venv"
echo "== $venv: $want"
"$python" -m venv "$venv"
pip_into "$venv" "$want"
echo "$want" > "$venv/installed"
