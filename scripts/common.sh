# shellcheck shell=bash
# Sourced by the launch scripts: $root is the checkout, $python its interpreter (PYTHON, a path or a name, picks another one).
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { echo "$(basename "$0"): $*" >&2; exit 2; }

if [ -n "${PYTHON:-}" ]; then
    python=$(type -P "$PYTHON") || fail "PYTHON=$PYTHON: no such program; name a Python that has rlcore, or leave it out"
    case $python in /*) ;; *) python=$PWD/$python ;; esac
elif [ -x "$root/.venv/bin/python" ]; then
    python=$root/.venv/bin/python
else
    python=$(type -P python3) || fail "no Python: neither $root/.venv/bin/python (./scripts/install.sh makes it) nor python3"
fi

# An address by which other nodes reach this node: HOST_ADDRESS, else that of the route to MASTER_ADDR, else the first of the machine.
own_address() {
    local address=${HOST_ADDRESS:-} there
    if [ -z "$address" ] && there=$(getent ahostsv4 "${MASTER_ADDR:-}") && [ -n "$there" ]; then
        address=$(ip -o route get "${there%% *}" 2> /dev/null | sed -n 's/.* src \([0-9.]*\).*/\1/p')
        case $address in 127.*) address='' ;; esac
    fi
    [ -n "$address" ] || address=$(hostname -I 2> /dev/null | cut -d' ' -f1)
    [ -n "$address" ] || fail "this machine names no address of its own: set HOST_ADDRESS to one that the other nodes reach"
    echo "$address"
}

# The engines' keys are only in the environment, never on a command line or in a file.
need_keys() {
    [ -n "${RLCORE_ENGINE_API_KEY:-}" ] && [ -n "${RLCORE_ENGINE_ADMIN_KEY:-}" ] ||
        fail "export RLCORE_ENGINE_API_KEY and RLCORE_ENGINE_ADMIN_KEY, two of \`openssl rand -hex 32\`, the same on every node"
}
