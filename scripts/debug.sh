#!/usr/bin/env bash
# One process with everything in it, on one GPU or none: breakpoint() works anywhere, in the rollouts too.
#
#   ./scripts/debug.sh [--pdb] [CONFIG.yaml ...] [key=value ...]
#
# Without a file it trains a tiny model for 3 steps by GRPO on addition problems (MODEL=/models/Qwen2.5-0.5B: that model).
# Your own files run with one rank, without layout, and with the embedded engine. --pdb starts under Python's debugger.
# The run is named "debug" and is overwritten each time, also under a name of your own (run.name=...).
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

start=("$python")
if [ "${1:-}" = --pdb ]; then shift; start+=(-m pdb); fi

file='' given=()
for word in "$@"; do
    case $word in *=*) ;; *.yaml | *.yml) file=$word ;; esac
done
if [ -z "$file" ]; then
    cd "$root"
    model=${MODEL:-build/debug/model}
    if [ -z "${MODEL:-}" ]; then "$python" -m rlcore init-model "$model" --preset addition --overwrite; fi
    [ -e build/debug/data ] || "$python" examples/addition/make_data.py build/debug/data
    given=(
        examples/addition/base.yaml examples/addition/grpo.yaml "model.path=$model" training.steps=3
        data.paths=build/debug/data/train.jsonl evaluation.every=0 'evaluation.paths=[]' rollout.prompts_per_step=4
    )
fi

# Reset whatever lays the run out over ranks, GPUs and servers.
one_rank=(
    cluster.launcher=local cluster.nodes=1 cluster.processes_per_node=1
    policy.parallel.tensor=1 policy.parallel.pipeline=1 policy.parallel.virtual_pipeline=1 policy.parallel.context=1
    policy.parallel.expert=1 policy.parallel.expert_tensor=null policy.parallel.sequence=false policy.optimizer.distributed=false
    policy.parallel.first_stage_layers=null policy.parallel.last_stage_layers=null critic.optimizer.distributed=false
)
engine=(kind=embedded count=1 colocated=false device=null)
servers=(
    python=null 'urls=[]' urls_file=null tensor_parallel=1 'gpus=[]' host=127.0.0.1 server=null router_url=null transport=auto weights_dir=null
    max_in_flight=256 'environment={}'
)
exec "${start[@]}" -m rlcore train ${given[@]+"${given[@]}"} run.name=debug rollout.service=in_process rollout.max_staleness=0 \
    "${one_rank[@]}" "${engine[@]/#/rollout.engine.}" "${servers[@]/#/rollout.engine.}" "$@" --overwrite
