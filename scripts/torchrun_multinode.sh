#!/usr/bin/env bash
# Train on several nodes without Ray: run this on every node with the same arguments.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=8 ./scripts/torchrun_multinode.sh CONFIG.yaml [key=value ...]
#
# NODE_RANK counts from 0 and MASTER_ADDR is node 0's address, the same everywhere. MASTER_PORT (29400) must be free on node 0.
# PYTHON picks the interpreter (default: .venv/bin/python of this checkout, else python3).
set -euo pipefail
: "${NNODES:?the number of nodes}" "${NODE_RANK:?the rank of this node, from 0}" "${MASTER_ADDR:?the address of node 0}"
: "${GPUS_PER_NODE:?processes on each node: one a GPU}"
[ $# -gt 0 ] || { echo "usage: $0 CONFIG.yaml [key=value ...]" >&2; exit 2; }

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3

exec "$python" -m torch.distributed.run \
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29400}" \
    -m rlcore train "$@" cluster.launcher=torchrun
