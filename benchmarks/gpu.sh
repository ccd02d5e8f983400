#!/usr/bin/env bash
# One CUDA GPU: is the CUDA path right, and how fast does it train? Needs torch and megatron-core, no network, no TE, no Apex.
#   benchmarks/gpu.sh [--json FILE] [--only checks|train] [--models 0.5B,1.5B] [--recompute]
#   benchmarks/gpu.sh --toy        the same script on the CPU at toy size
# PYTHON names the interpreter; default: this checkout's .venv, else python3.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
[ -x "$python" ] || [ -n "${PYTHON:-}" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
export PYTHONWARNINGS=ignore       # Megatron's, of what it does without Transformer Engine and Apex
exec "$python" "$root/benchmarks/gpu.py" "$@"
