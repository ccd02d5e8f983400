#!/usr/bin/env bash
# From a bare machine to a real language model, SmolLM2-135M-Instruct, trained by GRPO on a task that can be checked. No GPU.
#
#   ./examples/smollm2/run.sh                        sums of two numbers below 100, from the embedded engine
#   ./examples/smollm2/run.sh --engine sglang        ... from a real SGLang server, in an environment of its own
#   ./examples/smollm2/run.sh --task products        another task: chain_sum, products (of reasoning-gym)
#
# The weights come from the package index. The results are in runs/smollm2-TASK/ (runs/smollm2-TASK-sglang/).
set -euo pipefail
cd "$(dirname "$0")/../.."
started=$(date +%s)

task=addition extras=(plot smollm2) engine=() suffix=
usage() { echo "usage: $0 [--task addition|chain_sum|products] [--engine embedded|sglang]" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case "$1 ${2:-}" in
        "--task addition") ;;
        "--task chain_sum" | "--task products") task=$2 extras+=(reasoning-gym) ;;
        "--engine embedded") ;;
        "--engine sglang") suffix=-sglang engine=(rollout.engine.kind=sglang rollout.engine.device=cpu) ;;
        *) usage ;;
    esac
    shift 2
done

./scripts/install.sh "${extras[@]}"
if [ ${#engine[@]} -gt 0 ]; then ./scripts/install_sglang.sh; fi
export PATH="$PWD/.venv/bin:$PATH"

echo "== 2. SmolLM2-135M-Instruct as a Hugging Face folder, and the problems"
TQDM_DISABLE=1 python examples/smollm2/make_model.py build/smollm2/model
python examples/addition/make_data.py build/smollm2/addition --chat

echo "== 3. GRPO"
run=smollm2-$task$suffix
rlcore train examples/smollm2/base.yaml "examples/smollm2/$task.yaml" ${engine[@]+"${engine[@]}"} run.name="$run" --overwrite

python examples/addition/summary.py "runs/$run" --started "$started" --title "GRPO of SmolLM2-135M: $task" --answers 5
