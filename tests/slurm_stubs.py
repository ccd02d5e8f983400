"""Stubs of Slurm's commands, for a job whose nodes are addresses of this machine.

`scontrol` names 10.0.0.N ($PREFIX.N) for each N of $NODES; `srun` starts its command for each node
at once, all on this machine, and knows --kill-on-bad-exit.
"""

# The programs below are verbatim.
# ruff: noqa: E501

from __future__ import annotations

from pathlib import Path

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do
    case $1 in
        --nodes=*) count=${1#*=} ;;
        --nodelist=*) IFS=, read -ra nodes <<< "${1#*=}" ;;
        --kill-on-bad-exit=*) kill=${1#*=} ;;
        --container-image=*) export IMAGE=${1#*=}; cd / ;;
    esac
    shift
done
pids=() code=0
# The signal may come between the start of a process and the note of its id.
trap 'kill $(jobs -p) 2> /dev/null; wait; exit 143' TERM
for ((i = 0; i < count; i++)); do SLURM_PROCID=$i HOST_ADDRESS=${nodes[i]:-10.0.0.$i} "$@" & pids+=($!); done
for _ in "${pids[@]}"; do
    wait -n || {
        ended=$?
        [ $code != 0 ] || code=$ended
        [ "$kill" = 0 ] || kill "${pids[@]}" 2> /dev/null
    }
done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] && printf "${PREFIX:-10.0.0}.%s\\n" $NODES
"""


def write_stubs(folder: Path) -> None:
    """Write `srun` and `scontrol` to `folder`, which goes in front of PATH."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def job(nodes: int) -> dict[str, str]:
    """The variables that Slurm sets for a job with so many nodes."""
    numbers = " ".join(map(str, range(1, nodes + 1)))
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": f"gpu[1-{nodes}]", "NODES": numbers}
