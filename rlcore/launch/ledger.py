"""`rlcore ledger RUN`: what became of every prompt that a run has drawn, and whether it balances."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rlcore.errors import UserError
from rlcore.runs.directory import RunDirectory
from rollout.audit import Audit, audit
from rollout.history import DETAILS, History, read_journal

BALANCED, CONTRADICTED = 0, 1
MOST = 10       # contradictions that are shown


def show_ledger(path: Path, *, draw: int | None, as_json: bool, recordings: bool) -> int:
    """Print it. The exit code: 0 when everything agrees, 1 when something contradicts something.

    Raises:
        UserError: `path` is no run, has no ledger, or has not made that draw.
    """
    run = RunDirectory(path)
    found = audit(run, recordings=recordings)
    if draw is not None:
        lines = list(life_of(read_journal(run.ledger_path), draw))
    elif as_json:
        lines = [json.dumps({**asdict(found), "balanced": not found.contradictions}, indent=2)]
    else:
        lines = list(describe(found))
    print("\n".join(lines))
    return CONTRADICTED if found.contradictions else BALANCED


def describe(found: Audit) -> Iterator[str]:
    """The whole ledger, in a few lines."""
    states = ", ".join(f"{count} {state}" for state, count in found.states.items() if count)
    yield f"draws            {found.draws}: {states}" if states else f"draws            {found.draws}"
    yield f"steps            {found.steps}"
    if found.given_up:
        yield "given up         " + ", ".join(f"{count} {reason}" for reason, count in sorted(found.given_up.items()))
    yield f"restarts         {found.restarts}" + (f", which rewound {found.rewound} lines" if found.restarts else "")
    yield "checkpoint       " + ("none" if found.checkpoint is None else f"step {found.checkpoint}")
    yield f"recordings       of {found.recorded} steps"
    if not found.contradictions:
        yield "balanced"
        return
    yield "NOT balanced:"
    yield from (f"  {one}" for one in found.contradictions[:MOST])
    if len(found.contradictions) > MOST:
        yield f"  and {len(found.contradictions) - MOST} more"


def life_of(history: History, draw: int) -> Iterator[str]:
    """Everything that happened to one draw, by line of the journal."""
    ledger = history.at()
    life = history.life(draw)
    if not life or ledger is None:
        raise UserError(f"{history.path}: draw {draw} was not made; the ledger knows {0 if ledger is None else len(ledger)}")
    yield f"draw {draw}: " + (ledger.state(draw) if 0 <= draw < len(ledger) else "not drawn, since it was rewound")
    for number, transition, detail, rewound_by in life:
        told = "" if detail is None else f" ({DETAILS[transition]} {detail})"
        yield f"  line {number:<8} {transition}{told}" + ("" if rewound_by is None else f", rewound by line {rewound_by}")
