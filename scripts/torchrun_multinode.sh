#!/usr/bin/env bash
# Train on several nodes without Ray: run this on every trainer node with the same arguments.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=8 ./scripts/torchrun_multinode.sh CONFIG.yaml [key=value ...]
#
# NODE_RANK counts from 0 and MASTER_ADDR is node 0's address, the same everywhere. MASTER_PORT (29400) must be free on node 0.
# MAX_RESTARTS (3): how often a node restarts its ranks when one fails; they resume from the last checkpoint by themselves.
# PYTHON, a path or a name, picks the interpreter (default: .venv/bin/python of this checkout, else python3).
#
# Engines on other nodes: run engines.sh there, and name here the shared folder and the number of those nodes:
#
#   ENGINES=/shared/run1/engines ENGINE_NODES=2 NNODES=... ./scripts/torchrun_multinode.sh CONFIG.yaml [key=value ...]
#
# This waits for them (ENGINES_TIMEOUT_S, 1800), and the run follows the folder, where others may come and go; export their keys as on their nodes. Or, if you know the URLs:
# ENGINE_URLS=http://10.0.0.3:30000,http://10.0.0.4:30000
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"
: "${NNODES:?the number of trainer nodes}" "${NODE_RANK:?the rank of this node, from 0}" "${MASTER_ADDR:?the address of node 0}"
: "${GPUS_PER_NODE:?processes on each node: one a GPU}"
[ $# -gt 0 ] || fail "usage: $0 CONFIG.yaml [key=value ...]"

engines=()
if [ -n "${ENGINES:-}" ]; then
    : "${ENGINE_NODES:?the number of nodes that run engines.sh}"
    need_keys
    listed() { find "$ENGINES" -maxdepth 1 -name '*.json' -printf '%f ' 2>/dev/null || true; }
    echo "waiting for $ENGINE_NODES engine nodes in $ENGINES"
    until [ "$(listed | wc -w)" -ge "$ENGINE_NODES" ]; do
        [ $SECONDS -lt "${ENGINES_TIMEOUT_S:-1800}" ] || fail "$(listed | wc -w) of $ENGINE_NODES engine nodes are ready after" \
            "${ENGINES_TIMEOUT_S:-1800} s (ENGINES_TIMEOUT_S): $(listed); look at the output of engines.sh on the others"
        sleep 1
    done
    echo "engines: $(listed)"
    engines=(rollout.engine.kind=sglang "rollout.engine.urls_file=$ENGINES")
elif [ -n "${ENGINE_URLS:-}" ]; then
    engines=(rollout.engine.kind=sglang "rollout.engine.urls=[${ENGINE_URLS//,/, }]")
fi

exec "$python" -m rlcore.launch.torchrun \
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29400}" --max-restarts "${MAX_RESTARTS:-3}" \
    -m rlcore train "$@" cluster.launcher=torchrun ${engines[@]+"${engines[@]}"}
