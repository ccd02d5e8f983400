#!/usr/bin/env bash
# From a bare machine (git, python3, pip; no GPU) to a language model that learns to add by reinforcement, in minutes.
#
#   ./scripts/quickstart.sh                       responses come from the embedded engine
#   ./scripts/quickstart.sh --engine sglang       ... from a real SGLang server, in an environment of its own (3 GB more)
#
#   1. installs rlcore into .venv            3. warms it up by supervised fine-tuning, on one rank
#   2. writes a tiny Qwen3 and the problems  4. trains it with GRPO on two Megatron ranks (tensor parallel)
#
# What it leaves: runs/quickstart/ (runs/quickstart-sglang/) with metrics, a reward curve (curve.png), a Hugging Face folder
# and summary.json.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$(date +%s)

run=quickstart engine=()
case "$*" in
    "" | "--engine embedded") ;;
    "--engine sglang") run=quickstart-sglang engine=(examples/addition/sglang.yaml rollout.engine.device=cpu) ;;    # as its environment
    *) echo "usage: $0 [--engine embedded|sglang]" >&2; exit 2 ;;
esac

./scripts/install.sh plot
if [ ${#engine[@]} -gt 0 ]; then ./scripts/install_sglang.sh; fi
export PATH="$PWD/.venv/bin:$PATH"

echo "== 2. A tiny Qwen3 with a character tokenizer, and addition problems"
rlcore init-model build/addition/model --preset addition --overwrite
python examples/addition/make_data.py build/addition/data

echo "== 3. Warm-up: supervised fine-tuning on one rank, on labels of which 60 % drop their carries"
rlcore train examples/addition/sft.yaml run.name=quickstart-warmup --overwrite

echo "== 4. GRPO on two tensor-parallel ranks, from the warm-up's checkpoint (saved at TP 1, resharded to TP 2)"
rlcore train examples/addition/base.yaml examples/addition/grpo.yaml ${engine[@]+"${engine[@]}"} run.name="$run" \
    policy.checkpoint=runs/quickstart-warmup policy.parallel.tensor=2 cluster.processes_per_node=2 --overwrite

python examples/addition/summary.py "runs/$run" --started "$started"
