#!/usr/bin/env bash
# The SGLang engines of one node, for a trainer on other nodes (torchrun_multinode.sh): run this on every engine node.
#
#   ENGINES=/shared/run1/engines ./scripts/engines.sh CONFIG.yaml [SERVERS.yaml] [key=value ...]
#
# ENGINES             a folder that all nodes share, new for each run: once the engines are ready, their URLs are put there
# ENGINES_PER_NODE    rollout.engine.count of this node (default: as configured)
# HOST_ADDRESS        the address by which the trainer reaches this node (default: its first)
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
exec "$python" -m rlcore engine ${settings[@]+"${settings[@]}"} ${ENGINES_PER_NODE:+"rollout.engine.count=$ENGINES_PER_NODE"} \
    cluster.launcher=torchrun rollout.engine.kind=sglang "rollout.engine.host=$address" --urls-file "$ENGINES/$address.json"
