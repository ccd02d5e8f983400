# shellcheck shell=bash
# Sourced by the scripts that install: what scripts/locks/ names, each file checked by its hash.

# locked LOCK TAG...: the entries of a lock that are for one of these.
locked() {
    local lock=$1
    shift
    awk -v tags=" $* " '
        /^# for:/ { wanted = 0; for (i = 3; i <= NF; i++) if (index(tags, " " $i " ")) wanted = 1 }
        wanted' "$lock"
}

# is_made VENV STAMP: whether VENV was made from what STAMP names. The stamp is written last: a half-made environment has none.
# One whose interpreter has gone does not run.
is_made() { [ "$(cat "$1/installed" 2>/dev/null)" = "$2" ] && "$1/bin/python" -c '' 2>/dev/null; }

# empty_venv VENV: make it anew, with the interpreter that PYTHON names.
empty_venv() {
    local venv=$1 python="${PYTHON:-python3}"
    if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
        echo "$(basename "$0" .sh): $python is $("$python" -V 2>&1), expected Python 3.11 to 3.13; set PYTHON" >&2
        return 1
    fi
    [ ! -e "$venv" ] || echo "== $venv is of another lock or was left half made: it is made anew"
    rm -rf "$venv"
    "$python" -m venv "$venv"
}

# install_locked VENV LOCK TAG...: install those entries into VENV.
install_locked() {
    local venv=$1 lock=$2 build=""
    shift 2
    # torch first: where the package index has no build of it for the CPU, that of PyPI comes, with CUDA's libraries.
    if grep -q '^# for: cpu-build' "$lock"; then
        build=cpu-build
        if ! install_entries "$venv" "$lock" cpu-build 2> "$venv/failed"; then
            # What pip and uv say of a version that is not there, and of a file with another hash.
            if ! grep -qiE 'no matching distribution|no version of|hash mismatch|do not match the hashes' "$venv/failed"; then
                cat "$venv/failed" >&2
                return 1
            fi
            build=cuda-build
            echo "   $venv: the package index has no build of torch for the CPU that $lock knows; the one for CUDA" \
                "comes, on Linux with 3 GB of libraries, and runs on the CPU too"
        fi
    fi
    install_entries "$venv" "$lock" "$build" "$@"
}

# install_entries VENV LOCK TAG...
install_entries() {
    local venv=$1 lock=$2 check=(--require-hashes)
    shift 2
    locked "$lock" "$@" > "$venv/locked.txt"
    if [ "${RLCORE_HASHES:-}" = off ]; then
        check=()
        sed -i '/--hash=/d; s/ \\$//' "$venv/locked.txt"
    fi
    # Without dependencies, so without a resolver: the lock has them all.
    if ! pip_into "$venv" --no-deps "${check[@]}" ${build_alone:+--no-build-isolation} -r "$venv/locked.txt"; then
        echo "$(basename "$0"): the above failed for $lock (the full log: $venv/pip.log). If your index serves other files than" \
            "PyPI and you trust it, RLCORE_HASHES=off installs the same versions unchecked" >&2
        return 1
    fi
}

# pip_into VENV ARGUMENTS...: install into VENV, with uv where there is one, else with pip; says every 20 s what it does.
pip_into() {
    local venv=$1 installer pid from=$SECONDS next=20
    shift
    local log=$venv/pip.log
    # compile_imports does it for what is imported; compiling all packages takes longer than unpacking them.
    installer=("$venv/bin/python" -m pip install --progress-bar off --no-compile)
    # As pip does, uv is to look into all indexes; what it takes is known by its hash.
    if command -v uv > /dev/null; then
        installer=(env "UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}" uv pip install --python "$venv/bin/python")
    fi
    "${installer[@]}" "$@" > "$log" 2>&1 < /dev/null &
    pid=$!
    trap 'kill "$pid" 2> /dev/null; exit 130' INT TERM
    while kill -0 "$pid" 2> /dev/null; do
        sleep 0.2
        if ((SECONDS - from >= next)); then
            echo "   $venv: $next s, $(grep -v WARNING "$log" | tail -n 1 | cut -c1-80)"
            next=$((next + 20))
        fi
    done
    trap - INT TERM
    if ! wait "$pid"; then
        tail -n 30 "$log" >&2
        return 1
    fi
}

# compile_imports VENV PROGRAM: write the bytecode of all that PROGRAM imports. Where PYTHONDONTWRITEBYTECODE is set, as in many
# images, each process would compile torch anew. A machine without a GPU's driver, where an image is built, may not import all.
compile_imports() {
    PYTHONDONTWRITEBYTECODE="" "$1/bin/python" -W ignore -c "$2" ||
        echo "   $1: not all could be imported here, see above; what was not is compiled when it is"
}
