#!/usr/bin/env bash
# Make .venv-sglang, the engines' own environment: sglang pins a torch of its own and shares nothing with the trainer's.
#   ./scripts/install_sglang.sh [--gpu]        CPU: 3 GB, 2 to 4 minutes.  --gpu: with its CUDA packages
# PYTHON chooses the interpreter, 3.11 to 3.13. Versions and hashes: scripts/locks/engine-{cpu,gpu}.txt. Does nothing where
# the same is already installed; anything else there is made anew, except that packages for GPUs make way for those for the
# CPU only when you remove them.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/pip.sh
. scripts/pip.sh
venv=.venv-sglang kind=cpu
if [ "${1:-}" = --gpu ]; then kind=gpu; shift; fi
if [ $# -gt 0 ]; then echo "usage: install_sglang.sh [--gpu]; got: $*" >&2; exit 2; fi

fail() { echo "install_sglang: $*" >&2; exit 1; }
lock=scripts/locks/engine-$kind.txt
version=$(sed -n 's/^sglang==\([^ ]*\).*/\1/p' "$lock")
want="$kind sglang $version $(cksum < "$lock")"

# Two at a time would each remove what the other makes. Open to write, which NFS asks of a lock.
exec 9>> scripts/locks/engine-cpu.txt
flock 9
if is_made "$venv" "$want"; then exit 0; fi
if [ $kind = cpu ] && grep -qs '^gpu ' "$venv/installed"; then
    fail "$venv holds the packages for GPUs; remove it to have those for the CPU made"
fi

echo "== $venv: sglang $version ($kind)"
empty_venv "$venv"
install_locked "$venv" "$lock" base
if [ $kind = cpu ]; then
    export SGLANG_USE_CPU_ENGINE=1
    PYTHONPATH=rollout/engines/sglang/cpu compile_imports "$venv" \
        "import stubs; stubs.install(); import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler"
fi
found=$("$venv/bin/python" -W ignore rollout/engines/sglang/entry.py --version < /dev/null) ||
    fail "sglang cannot be imported in $venv, see above; where pip failed too, run this script again"
[ "$found" = "$version" ] || fail "sglang $found came into $venv, wanted $version"
echo "$want" > "$venv/installed"
