# shellcheck shell=bash
# Sourced by the launch scripts: $root is the checkout, $python its interpreter (PYTHON picks another one).
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)

fail() { echo "$(basename "$0"): $*" >&2; exit 2; }

# One address by which other nodes reach this one: HOST_ADDRESS, else the first that the machine names.
own_address() {
    local address=${HOST_ADDRESS:-$(hostname -I 2>/dev/null | cut -d' ' -f1)}
    [ -n "$address" ] || fail "this machine names no address of its own: set HOST_ADDRESS to one that the other nodes reach"
    echo "$address"
}

# The engines' keys stand in the environment alone: no command line, no file.
need_keys() {
    [ -n "${RLCORE_ENGINE_API_KEY:-}" ] && [ -n "${RLCORE_ENGINE_ADMIN_KEY:-}" ] ||
        fail "export RLCORE_ENGINE_API_KEY and RLCORE_ENGINE_ADMIN_KEY, the same two random words on every node"
}
