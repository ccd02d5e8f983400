#!/usr/bin/env bash
# From a bare machine (git, python3, pip; no GPU) to a language model that learns to add by reinforcement, in minutes.
#
#   1. installs rlcore into .venv            3. warms it up by supervised fine-tuning, on one rank
#   2. writes a tiny Qwen3 and the problems  4. trains it with GRPO on two Megatron ranks (tensor parallel)
#
# What it leaves: runs/quickstart/ with metrics, a reward curve (curve.png), a Hugging Face folder and summary.json.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$(date +%s)

./scripts/install.sh plot
export PATH="$PWD/.venv/bin:$PATH"

echo "== 2. A tiny Qwen3 with a character tokenizer, and addition problems"
rlcore init-model build/addition/model --preset addition --overwrite
python examples/addition/make_data.py build/addition/data

echo "== 3. Warm-up: supervised fine-tuning on one rank, on labels of which 60 % drop their carries"
rlcore train examples/addition/sft.yaml run.name=quickstart-warmup --overwrite

echo "== 4. GRPO on two tensor-parallel ranks, from the warm-up's checkpoint (saved at TP 1, resharded to TP 2)"
rlcore train examples/addition/base.yaml examples/addition/grpo.yaml run.name=quickstart \
    policy.checkpoint=runs/quickstart-warmup policy.parallel.tensor=2 cluster.processes_per_node=2 --overwrite

python examples/addition/summary.py runs/quickstart --started "$started"
