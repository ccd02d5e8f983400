#!/usr/bin/env bash
# The SGLang engines of one node, for a trainer on other nodes (torchrun_multinode.sh): run this on every engine node.
#
#   ENGINES=/shared/run1/engines ./scripts/engines.sh CONFIG.yaml [SERVERS.yaml] [key=value ...]
#
# ENGINES             a folder that all nodes share, new for each run: once the engines are ready, their URLs are put there
# ENGINES_PER_NODE    rollout.engine.count of this node (default: as configured)
# NODES_PER_ENGINE    nodes that one engine spans (default 1); rollout.engine.tensor_parallel counts the GPUs of all of them
# ENGINE_NODE         with it: the number of this node among the engine nodes, from 0 (default: SLURM_PROCID)
# HEAD_PORT           with it: a free port on the first node of each engine (default 29500)
# HOST_ADDRESS        the address by which the trainer reaches this node (default: of the route to MASTER_ADDR, else its first)
# RLCORE_ENGINE_API_KEY and RLCORE_ENGINE_ADMIN_KEY must be exported, the same on every node.
# It runs until SIGINT or SIGTERM, or until no engine is left; then it deletes its URLs. The arguments may be the trainer's;
# --resume and --overwrite are ignored.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"
[ $# -gt 0 ] || fail "usage: $0 CONFIG.yaml [SERVERS.yaml] [key=value ...]"
: "${ENGINES:?a folder that all nodes share}"
need_keys

settings=()
for word in "$@"; do
    case $word in --resume | --overwrite) ;; *) settings+=("$word") ;; esac
done
address=$(own_address)
mkdir -p "$ENGINES"

span=()
if [ "${NODES_PER_ENGINE:-1}" -gt 1 ]; then
    node=${ENGINE_NODE:-${SLURM_PROCID:-}}
    : "${node:?ENGINE_NODE: the number of this node among the engine nodes, from 0}"
    rank=$((node % NODES_PER_ENGINE))
    head=$ENGINES/head-$((node / NODES_PER_ENGINE))
    if [ $rank -eq 0 ]; then
        echo "$address:${HEAD_PORT:-29500}" > "$head.new"
        mv "$head.new" "$head"
    fi
    ends=$((SECONDS + ${ENGINES_TIMEOUT_S:-1800}))
    until [ -f "$head" ]; do
        [ $SECONDS -lt $ends ] || fail "no node has written $head after ${ENGINES_TIMEOUT_S:-1800} s: is ENGINE_NODE right on every engine node?"
        sleep 1
    done
    span=(--nodes "$NODES_PER_ENGINE" --node-rank "$rank" --head "$(cat "$head")")
    ENGINES_PER_NODE=1
fi

exec "$python" -m rlcore engine ${settings[@]+"${settings[@]}"} ${ENGINES_PER_NODE:+"rollout.engine.count=$ENGINES_PER_NODE"} \
    cluster.launcher=torchrun rollout.engine.kind=sglang "rollout.engine.host=$address" --urls-file "$ENGINES/$address.json" \
    ${span[@]+"${span[@]}"}
