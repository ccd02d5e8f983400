# shellcheck shell=bash
# Sourced by the scripts that install.

# NCCL of the trainer's and of the engines' environment for GPUs: ranks of different versions make no communicator. It is the one
# that the torch of sglang 0.5.23 brings (torch 2.14.1); the trainer's torch 2.13.0 would bring 2.29.7.
# shellcheck disable=SC2034  # used where this is sourced
nccl=nvidia-nccl-cu13==2.30.7

# pip_into VENV ARGUMENTS...: install into VENV, with uv where there is one, else with pip; says every 20 s what it does.
pip_into() {
    local venv=$1 installer pid from=$SECONDS seconds
    shift
    local log=$venv/pip.log
    # What is imported is compiled then; compiling all packages here takes longer than unpacking them.
    installer=("$venv/bin/python" -m pip install --progress-bar off --no-compile)
    if command -v uv > /dev/null; then installer=(uv pip install --python "$venv/bin/python"); fi
    "${installer[@]}" "$@" > "$log" 2>&1 < /dev/null &
    pid=$!
    trap 'kill "$pid" 2> /dev/null; exit 130' INT TERM
    while kill -0 "$pid" 2> /dev/null; do
        sleep 1
        seconds=$((SECONDS - from))
        if ((seconds % 20 == 0 && seconds > 0)); then
            echo "   $venv: $seconds s, $(grep -v WARNING "$log" | tail -n 1 | cut -c1-80)"
        fi
    done
    trap - INT TERM
    if ! wait "$pid"; then
        tail -n 30 "$log" >&2
        return 1
    fi
}
