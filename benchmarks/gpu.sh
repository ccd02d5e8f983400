#!/usr/bin/env bash
# One CUDA GPU: is the CUDA path right, and how fast is it? Ends within ten minutes. No network, no Transformer Engine, no Apex.
#   benchmarks/gpu.sh [--json FILE] [--only SECTIONS] [--recompute] [--micro-tokens N] [--limit SECONDS]
#   benchmarks/gpu.sh --toy             the same sections on the CPU at toy size
# For a machine that has Python 3.12 with torch and nothing else of ours, first here, then there:
#   benchmarks/gpu.sh --prepare DIR     gather wheels (PYTHON_VERSION, default 3.12) and compute the references on the CPU
#   benchmarks/gpu.sh --bundle DIR ...  install the wheels for this run alone, and use the references
# PYTHON names the interpreter; default: this checkout's .venv, else python3.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
[ -x "$python" ] || [ -n "${PYTHON:-}" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PYTHONWARNINGS=ignore       # Megatron's, of what it does without Transformer Engine and Apex

# What the sections import and a machine with torch and transformers may lack; a test compares it with what they did import.
wheels=(megatron-core pydantic pydantic-core annotated-types typing-inspection orjson zstandard psutil xxhash)
most=$((64 << 20))      # bytes that such a machine takes along

prepare() {     # prepare DIR
    local target=$1 name bytes pinned=() platforms=()
    mkdir -p "$target/wheels"
    rm -f "$target"/wheels/*.whl
    for name in "${wheels[@]}"; do
        pinned+=("$name==$("$python" -c 'import sys; from importlib.metadata import version; print(version(sys.argv[1]))' "$name")")
    done
    for name in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux2010 manylinux1; do
        platforms+=(--platform "${name}_x86_64")
    done
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp "${platforms[@]}" \
        --python-version "${PYTHON_VERSION:-3.12}" --dest "$target/wheels" "${pinned[@]}"
    "$python" "$root/benchmarks/gpu.py" --write-references "$target"
    bytes=$(du -sb "$target" | cut -f 1)
    if [ "$bytes" -gt "$most" ]; then
        echo "$target has $bytes bytes, expected at most $most: take packages out of 'wheels' in $0" >&2
        exit 1
    fi
    echo "$target: $bytes bytes"
}

case "${1:-}" in
    --prepare) prepare "${2:?a folder}"; exit ;;
    --bundle)
        bundle=$(cd "${2:?a folder}" && pwd)
        shift 2
        folder=$(mktemp -d)
        trap 'rm -rf "$folder"' EXIT
        site=$folder/site-packages
        if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then      # else every process compiles all that it imports
            unset PYTHONDONTWRITEBYTECODE
            export PYTHONPYCACHEPREFIX=$folder/bytecode
        fi
        "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$bundle"/wheels/*.whl
        PYTHONPATH="$PYTHONPATH:$site" "$python" "$root/benchmarks/gpu.py" --references "$bundle" "$@"
        exit ;;
esac
exec "$python" "$root/benchmarks/gpu.py" "$@"
