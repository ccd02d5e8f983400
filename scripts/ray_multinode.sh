#!/usr/bin/env bash
# Train on a Ray cluster made for one run: run this on every node, trainer and engine nodes alike, with the same arguments.
#
#   NODE_RANK=0 MASTER_ADDR=10.0.0.1 ./scripts/ray_multinode.sh CONFIG.yaml [SERVERS.yaml] [key=value ...]
#
# Node 0 is the head and runs `rlcore train`, which places ranks and engines where there is room; the other nodes lend what they
# have until it ends. MASTER_ADDR is node 0's address, RAY_PORT (6379) must be free there. RAY_ARGS: more for `ray start` (as
# "--num-gpus 4"); JOIN_TIMEOUT_S (600): for the head to be there. On a cluster that runs already, call `rlcore train` yourself.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"
: "${NODE_RANK:?the rank of this node, from 0}" "${MASTER_ADDR:?the address of node 0}"
[ $# -gt 0 ] || fail "usage: $0 CONFIG.yaml [SERVERS.yaml] [key=value ...]"
head_address=$MASTER_ADDR:${RAY_PORT:-6379}
ray=$(dirname "$python")/ray
[ -x "$ray" ] || ray=$(command -v ray) || fail "there is no ray beside $python: ./scripts/install.sh ray"
read -ra more <<< "${RAY_ARGS:-}"
deadline=$((SECONDS + ${JOIN_TIMEOUT_S:-600}))

until_there() {     # until_there PROCESS: the head answers; PROCESS ("" for none) must live meanwhile
    until "$ray" health-check --address "$head_address" > /dev/null 2>&1; do
        [ $SECONDS -lt $deadline ] || fail "no Ray head at $head_address within ${JOIN_TIMEOUT_S:-600} s (JOIN_TIMEOUT_S)"
        [ -z "$1" ] || kill -0 "$1" 2> /dev/null || fail "the Ray head has not started, see above"
        sleep 1
    done
}

if [ "$NODE_RANK" != 0 ]; then
    until_there ""
    if ! "$ray" start --block --address "$head_address" --node-ip-address "$(own_address)" ${more[@]+"${more[@]}"}; then
        echo "$(basename "$0"): this node has left the cluster of $head_address" >&2     # as it does when the head is gone
    fi
    exit 0
fi

# A session of its own: Ctrl-C is for the run, which saves and ends while its cluster is still there.
setsid "$ray" start --head --block --node-ip-address "$MASTER_ADDR" --port "${RAY_PORT:-6379}" ${more[@]+"${more[@]}"} &
head=$!
trap 'kill "$head" 2> /dev/null || true; wait "$head" || true' EXIT
until_there "$head"
"$python" -m rlcore train "$@" cluster.launcher=ray "cluster.ray.address=$head_address" &
run=$!
trap 'kill -TERM "$run" 2> /dev/null || true' TERM
trap 'kill -INT "$run" 2> /dev/null || true' INT
code=0
wait "$run" || code=$?
while kill -0 "$run" 2> /dev/null; do      # a signal ends `wait`, not the run
    code=0
    wait "$run" || code=$?
done
exit "$code"
