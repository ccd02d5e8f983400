#!/usr/bin/env bash
# From a bare machine to a real language model, SmolLM2-135M-Instruct, trained by GRPO on a task that can be checked. No GPU.
#
#   ./examples/smollm2/run.sh                        sums of two numbers below 100, from the embedded engine
#   ./examples/smollm2/run.sh --engine sglang        ... from a real SGLang server, in an environment of its own
#
# The weights come from the package index. The results are in runs/smollm2-addition/ (runs/smollm2-addition-sglang/).
set -euo pipefail
cd "$(dirname "$0")/../.."
started=$(date +%s)

run=smollm2-addition engine=()
case "$*" in
    "" | "--engine embedded") ;;
    "--engine sglang") run=smollm2-addition-sglang engine=(rollout.engine.kind=sglang rollout.engine.device=cpu) ;;
    *) echo "usage: $0 [--engine embedded|sglang]" >&2; exit 2 ;;
esac

./scripts/install.sh plot smollm2
if [ ${#engine[@]} -gt 0 ]; then ./scripts/install_sglang.sh; fi
export PATH="$PWD/.venv/bin:$PATH"

echo "== 2. SmolLM2-135M-Instruct as a Hugging Face folder, and the problems"
TQDM_DISABLE=1 python examples/smollm2/make_model.py build/smollm2/model
python examples/addition/make_data.py build/smollm2/addition --chat

echo "== 3. GRPO"
rlcore train examples/smollm2/base.yaml examples/smollm2/addition.yaml ${engine[@]+"${engine[@]}"} run.name="$run" --overwrite

python examples/addition/summary.py "runs/$run" --started "$started" --title "GRPO of SmolLM2-135M on addition" --answers 5
