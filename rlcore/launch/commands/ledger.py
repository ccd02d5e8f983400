"""`rlcore ledger RUN`: what became of every drawn prompt, and whether the ledger balances."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rlcore.errors import DataError, UserError
from rlcore.runs.directory import RunDirectory
from rlcore.terminal import printable
from rollout.accounting.audit import Audit, audit
from rollout.accounting.journal_reader import DETAILS, History, read_journal

BALANCED = 0
CONTRADICTED = 1
MOST = 10  # contradictions to show
NAMES = {**DETAILS, "drawn": "row", "finished": "passed"}  # of the detail of a transition


def show_ledger(path: Path, *, draw: int | None, as_json: bool, recordings: bool) -> int:
    """Print the ledger; return 0 if it balances or a `draw` was asked for, else 1.

    Raises:
        UserError: `path` is no run, has no ledger, or has not made that draw.
    """
    run = RunDirectory(path)
    if draw is not None:
        print(printable("\n".join(life_of(read_journal(run.ledger_path), draw))))
        return BALANCED
    found = audit(run, recordings=recordings)
    if as_json:
        print(json.dumps({**asdict(found), "balanced": not found.contradictions}, indent=2))
    else:
        print(printable("\n".join(describe(found))))
    return CONTRADICTED if found.contradictions else BALANCED


def describe(found: Audit) -> Iterator[str]:
    """Yield the lines of a summary of the ledger."""
    states = ", ".join(f"{count} {state}" for state, count in found.states.items() if count)
    yield (
        f"draws            {found.draws}: {states}" if states else f"draws            {found.draws}"
    )
    yield f"steps            {found.steps}"
    if found.given_up:
        yield "given up         " + ", ".join(
            f"{count} {reason}" for reason, count in sorted(found.given_up.items())
        )
    if found.failed:
        yield "failed           " + ", ".join(
            f"{count} {kind}" for kind, count in sorted(found.failed.items())
        )
    yield f"restarts         {found.restarts}" + (
        f", which rewound {found.rewound} lines" if found.restarts else ""
    )
    yield "checkpoint       " + ("none" if found.checkpoint is None else f"step {found.checkpoint}")
    yield f"recordings       of {found.recorded} steps"
    if not found.contradictions:
        yield "balanced"
        return
    yield "NOT balanced:"
    yield from (f"  {line}" for line in found.contradictions[:MOST])
    if len(found.contradictions) > MOST:
        yield f"  and {len(found.contradictions) - MOST} more"


def life_of(history: History, draw: int) -> Iterator[str]:
    """Yield lines on the state of a draw and what happened to it, by line of the journal.

    Raises:
        UserError: the draw was not made.
    """
    life = history.life(draw)
    yield f"draw {draw}: {_state_of(history, draw, rewound=bool(life))}"
    for number, transition, detail, rewound_by in life:
        suffix = "" if detail is None else f" ({NAMES[transition]} {detail})"
        yield f"  line {number:<8} {transition}{suffix}" + (
            "" if rewound_by is None else f", rewound by line {rewound_by}"
        )


def _state_of(history: History, draw: int, *, rewound: bool) -> str:
    try:
        ledger = history.at()
    # recovery: the draw's own lines can still be read
    except DataError as error:
        return f"in no one state, the journal contradicts itself: {error}"
    assert ledger is not None
    if 0 <= draw < len(ledger):
        return ledger.state(draw)
    if not rewound:
        raise UserError(f"{history.path}: draw {draw} was not made; the ledger knows {len(ledger)}")
    return "not drawn, since it was rewound"
