#!/usr/bin/env bash
# Make .venv-verifiers, an environment of its own for the workflow `verifiers`: the package pins openai and mcp.
#   ./scripts/install_verifiers.sh        360 MB, one to two minutes
# PYTHON chooses the interpreter, 3.11 to 3.13. Versions and hashes: scripts/locks/verifiers.txt. Does nothing where the same is
# already installed; anything else there is made anew. Your own environments go there too: .venv-verifiers/bin/pip install ...
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/pip.sh
. scripts/pip.sh
venv=.venv-verifiers lock=scripts/locks/verifiers.txt
if [ $# -gt 0 ]; then echo "usage: install_verifiers.sh; got: $*" >&2; exit 2; fi
version=$(sed -n 's/^verifiers==\([^ ]*\).*/\1/p' "$lock")
want="verifiers $version $(cksum < "$lock")"

# Two at a time would each remove what the other makes. Open to write, which NFS asks of a lock.
exec 9>> "$lock"
flock 9
if is_made "$venv" "$want"; then exit 0; fi
echo "== $venv: verifiers $version"
empty_venv "$venv"
install_locked "$venv" "$lock" base
echo "$want" > "$venv/installed"
