#!/usr/bin/env bash
# Make .venv and install rlcore into it, with the extras given as arguments. Does nothing for what is already there.
#   ./scripts/install.sh [--gpu] [EXTRA...]        --gpu: with the NCCL of the engines' environment (install_sglang.sh --gpu)
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/pip.sh
. scripts/pip.sh
gpu=""
if [ "${1:-}" = --gpu ]; then gpu=gpu; shift; fi
extras=$(IFS=,; echo "$*")

[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
stamp=.venv/installed
# Once for GPUs, always for GPUs: the resolver would put torch's own NCCL back.
if grep -qs ' gpu nvidia-nccl' "$stamp"; then gpu=gpu; fi
want="$(cksum < pyproject.toml) $extras${gpu:+ gpu $nccl}"
if ! grep -qxF "$want" "$stamp" 2> /dev/null; then
    echo "== .venv: rlcore${extras:+ with $extras}${gpu:+, for GPUs}"
    # torch by exact version and in the same run, so that no other package asks the resolver for another build of it.
    pip_into .venv torch==2.13.0 --editable ".${extras:+[$extras]}"
    # Without dependencies: torch 2.13.0 asks for NCCL 2.29.7, and takes this one as well, whose interface is the same.
    if [ -n "$gpu" ]; then pip_into .venv --no-deps "$nccl"; fi
    echo "$want" >> "$stamp"
fi
