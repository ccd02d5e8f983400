#!/usr/bin/env bash
# Make .venv and install rlcore into it, with the extras given as arguments. Does nothing for what is already there.
#   ./scripts/install.sh [--gpu] [EXTRA...]        --gpu: torch for CUDA, with the NCCL of install_sglang.sh --gpu
# PYTHON chooses the interpreter. Versions and hashes: scripts/locks/trainer-{cpu,gpu}.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/pip.sh
. scripts/pip.sh
fail() { echo "install: $*" >&2; exit 2; }
kind=cpu
if [ "${1:-}" = --gpu ]; then kind=gpu; shift; fi
stamp=.venv/installed
# Once for GPUs, always for GPUs: the build for the CPU would replace torch.
if grep -qs ' gpu' "$stamp"; then kind=gpu; fi
lock=scripts/locks/trainer-$kind.txt
known=$(sed -n 's/^# extras: //p' "$lock")
for extra in "$@"; do
    case " $known " in
        *" $extra "*) ;;
        *) fail "no extra $extra in $lock; there are $known; te needs --gpu, SGLang is install_sglang.sh" ;;
    esac
done

want="$(cat pyproject.toml "$lock" | cksum) $kind $*"
if grep -qxF "$want" "$stamp" 2> /dev/null && .venv/bin/python -c '' 2> /dev/null; then exit 0; fi
echo "== .venv: rlcore${*:+ with $*} ($kind)"
[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
install_locked .venv "$lock" base "$@"
if [[ " $* " = *" dev "* || " $* " = *" reasoning-gym "* ]]; then
    build_alone=yes install_entries .venv "$lock" reasoning-gym-source      # one of the three needs a C compiler
fi
if [[ " $* " = *" te "* ]]; then
    echo "== .venv: Transformer Engine, compiled for this torch, 28 files; a C++ compiler is needed"
    # CUDA's headers are those of the lock, as torch's are, and not those of a toolkit that the machine may have.
    cuda=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    # Its setup.py would take a wheel from elsewhere, whose hash nobody knows.
    export NVTE_PYTORCH_FORCE_BUILD=TRUE CUDA_HOME=$cuda/cu13 CPLUS_INCLUDE_PATH=$cuda/cudnn/include:$cuda/nccl/include
    build_alone=yes install_entries .venv "$lock" te-source
fi
# With the setuptools of the lock, not with one that pip fetches. Its default is a finder that every start of this interpreter
# imports, each program of the reward `code` too: 25 ms of CPU time.
pip_into .venv --no-deps --no-build-isolation --config-settings editable_mode=compat --editable .
compile_imports .venv "import transformers, backends.megatron.backend"
echo "$want" >> "$stamp"
