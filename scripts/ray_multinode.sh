#!/usr/bin/env bash
# Train on a Ray cluster made for one run: run this on every node, trainer and engine nodes alike, with the same arguments.
#
#   NODE_RANK=0 MASTER_ADDR=10.0.0.1 ./scripts/ray_multinode.sh CONFIG.yaml [SERVERS.yaml] [key=value ...]
#
# Node 0 is the head and runs `rlcore train`, which places ranks and engines where there is room; the other nodes offer their
# resources until it ends. MASTER_ADDR is node 0's address, RAY_PORT (6379) must be free there. RAY_ARGS: more arguments of `ray start` (as
# "--num-gpus 4"); JOIN_TIMEOUT_S (600): how long to wait for the head. On a running cluster call `rlcore train` yourself.
# Ray asks for a token: export RAY_AUTH_TOKEN, one of `openssl rand -hex 32`, the same on every node, unless they share a home with
# ~/.ray/auth_token in it.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"
: "${NODE_RANK:?the rank of this node, from 0}" "${MASTER_ADDR:?the address of node 0}"
[ $# -gt 0 ] || fail "usage: $0 CONFIG.yaml [SERVERS.yaml] [key=value ...]"
head_address=$MASTER_ADDR:${RAY_PORT:-6379}
ray=$(dirname "$python")/ray
[ -x "$ray" ] || ray=$(command -v ray) || fail "there is no ray beside $python: ./scripts/install.sh ray"
read -ra more <<< "${RAY_ARGS:-}"
export RAY_USAGE_STATS_ENABLED=${RAY_USAGE_STATS_ENABLED:-0}
export RAY_worker_niceness=${RAY_worker_niceness:-0}      # as under torchrun; Ray's default is 15
# Ray writes it for everybody to read
[ ! -O ~/.ray/auth_token ] || chmod 600 ~/.ray/auth_token
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}        # else `ray health-check` does not look into ~/.ray/auth_token
deadline=$((SECONDS + ${JOIN_TIMEOUT_S:-600}))

until_there() {     # until_there PROCESS: waits until the head answers; fails if PROCESS ("" for none) ends before
    until "$ray" health-check --address "$head_address" > /dev/null 2>&1; do
        [ $SECONDS -lt $deadline ] || fail "no Ray head at $head_address within ${JOIN_TIMEOUT_S:-600} s (JOIN_TIMEOUT_S)"
        [ -z "$1" ] || kill -0 "$1" 2> /dev/null || fail "the Ray head has not started, see above"
        sleep 3         # the check itself starts a Python
    done
}

until_ended() {     # until_ended PROCESS: waits for its exit code, in $code; Ctrl-C and SIGTERM end it
    # SIGTERM for both: what a script starts in the background begins with SIGINT ignored, and `ray start` keeps it so.
    # shellcheck disable=SC2064     # the process is known now
    trap "kill -TERM $1 2> /dev/null || true" INT TERM
    while kill -0 "$1" 2> /dev/null; do wait "$1" || true; done      # a signal ends `wait`, not the process
    code=0
    wait "$1" || code=$?
}

trap 'exit 130' INT         # also during a health check, which counts a Ctrl-C as its answer
if [ "$NODE_RANK" != 0 ]; then
    until_there ""
    "$ray" start --block --address "$head_address" --node-ip-address "$(own_address)" ${more[@]+"${more[@]}"} &
    until_ended $!
    if "$ray" health-check --address "$head_address" > /dev/null 2>&1; then exit "$code"; fi
    echo "$(basename "$0"): the cluster of $head_address has ended" >&2
    exit 0
fi

# Sessions of their own: Ctrl-C goes to the run only once, and the run saves and ends while its cluster is still there.
setsid "$ray" start --head --block --node-ip-address "$MASTER_ADDR" --port "${RAY_PORT:-6379}" ${more[@]+"${more[@]}"} &
head=$!
trap 'kill "$head" 2> /dev/null || true; wait "$head" || true' EXIT
until_there "$head"
setsid "$python" -m rlcore train "$@" cluster.launcher=ray "cluster.ray.address=$head_address" &
until_ended $!
exit "$code"
