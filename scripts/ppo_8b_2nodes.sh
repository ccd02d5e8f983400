#!/usr/bin/env bash
# Llama-3.1-8B by PPO with the hyper-parameters of the Tulu 3.1 recipe, on 2 nodes of 8 GPUs: the first trains, the second
# generates. Run it on both, from a checkout and with models and data that both reach by the same paths:
#
#   NODE_RANK=0|1 MASTER_ADDR=10.0.0.1 ./scripts/ppo_8b_2nodes.sh model.path=... critic.path=... data.paths=... [key=value ...]
#
# MASTER_ADDR is the first node's address. With LAUNCHER=ray Ray connects the nodes; else (torchrun, the default) ENGINES is a new
# folder that both share, and RLCORE_ENGINE_API_KEY and RLCORE_ENGINE_ADMIN_KEY are exported alike on both.
# The recipe, and which values are the original's: examples/recipes/llama-3.1-8b-ppo.yaml.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"
: "${NODE_RANK:?0 on the node that trains, 1 on the other}" "${MASTER_ADDR:?the address of the first node}"
recipe=$root/examples/recipes/llama-3.1-8b-ppo

case ${LAUNCHER:-torchrun}-$NODE_RANK in
    ray-*) exec "$root/scripts/ray_multinode.sh" "$recipe.yaml" "$recipe.servers.yaml" "$@" ;;
    torchrun-0)
        [ -n "${ENGINES:-}${ENGINE_URLS:-}" ] || fail "without Ray the nodes meet in a folder: set ENGINES to a new one that both share"
        NNODES=1 GPUS_PER_NODE=8 ENGINE_NODES=1 exec "$root/scripts/torchrun_multinode.sh" "$recipe.yaml" "$@"
        ;;
    torchrun-1) exec "$root/scripts/engines.sh" "$recipe.yaml" "$recipe.servers.yaml" "$@" ;;
    *) fail "LAUNCHER is torchrun or ray and NODE_RANK 0 or 1, got ${LAUNCHER:-torchrun} and $NODE_RANK" ;;
esac
