#!/usr/bin/env bash
# One process with everything in it, on one GPU or none: breakpoint() works anywhere, in the rollouts too.
#
#   ./scripts/debug.sh [--pdb] [CONFIG.yaml ...] [key=value ...]
#
# Without a file: GRPO on the addition problems, 3 steps, with a tiny model that it makes (MODEL=/models/Qwen2.5-0.5B: with that
# one). Your own files are run with one rank, without layout, the engine embedded. --pdb starts under Python's debugger.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"
cd "$root"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

start=("$python")
if [ "${1:-}" = --pdb ]; then shift; start+=(-m pdb); fi

given=()
case " $* " in
    *.yaml\ *) ;;
    *)
        model=${MODEL:-build/debug/model}
        if [ -z "${MODEL:-}" ]; then "$python" -m rlcore init-model "$model" --preset addition --overwrite; fi
        [ -e build/debug/data ] || "$python" examples/addition/make_data.py build/debug/data
        given=(
            examples/addition/base.yaml examples/addition/grpo.yaml run.name=debug "model.path=$model" training.steps=3
            data.paths=build/debug/data/train.jsonl evaluation.every=0 'evaluation.paths=[]' rollout.prompts_per_step=4
        )
        ;;
esac

exec "${start[@]}" -m rlcore train ${given[@]+"${given[@]}"} \
    cluster.launcher=local cluster.nodes=1 cluster.processes_per_node=1 \
    policy.parallel.tensor=1 policy.parallel.pipeline=1 policy.parallel.virtual_pipeline=1 policy.parallel.context=1 \
    policy.parallel.expert=1 policy.parallel.expert_tensor=null policy.parallel.sequence=false policy.optimizer.distributed=false \
    policy.parallel.first_stage_layers=null policy.parallel.last_stage_layers=null \
    rollout.engine.kind=embedded rollout.engine.in_process=true rollout.engine.tensor_parallel=1 rollout.max_staleness=0 \
    "$@" --overwrite
