"""`rlcore ledger RUN`: the fate of every drawn prompt, and whether the ledger balances."""

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

MAX_SHOWN = 10  # contradictions that are printed
NAMES = {**DETAILS, "drawn": "row", "finished": "passed"}  # name of each transition's detail


def show_ledger(path: Path, *, draw: int | None, as_json: bool, recordings: bool) -> int:
    """Print the ledger; return 0 if it balances or a `draw` was asked for, else 1.

    Raises:
        UserError: `path` is not a run, has no ledger, or has not made that draw.
    """
    run = RunDirectory(path)
    if draw is not None:
        print(printable("\n".join(life_of(read_journal(run.ledger_path), draw))))
        return 0
    found = audit(run, recordings=recordings)
    if as_json:
        print(json.dumps({**asdict(found), "balanced": not found.contradictions}, indent=2))
    else:
        print(printable("\n".join(describe(found))))
    return int(bool(found.contradictions))


def describe(found: Audit) -> Iterator[str]:
    """Yield the lines of a summary of the ledger."""
    states = ", ".join(f"{count} {state}" for state, count in found.states.items() if count)
    yield f"draws            {found.draws}" + (f": {states}" if states else "")
    yield f"steps            {found.steps}"
    for title, counts in (("given up", found.given_up), ("failed", found.failed)):
        if counts:
            why = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
            yield f"{title:<17}{why}"
    rewound = f", which rewound {found.rewound} lines" if found.restarts else ""
    yield f"restarts         {found.restarts}{rewound}"
    yield "checkpoint       " + ("none" if found.checkpoint is None else f"step {found.checkpoint}")
    yield f"recordings       of {found.recorded} steps"
    if not found.contradictions:
        yield "balanced"
        return
    yield "NOT balanced:"
    yield from (f"  {line}" for line in found.contradictions[:MAX_SHOWN])
    if len(found.contradictions) > MAX_SHOWN:
        yield f"  and {len(found.contradictions) - MAX_SHOWN} more"


def life_of(history: History, draw: int) -> Iterator[str]:
    """Yield lines on the state of a draw and what happened to it, by line of the journal.

    Raises:
        UserError: the draw was not made.
    """
    life = history.life(draw)
    try:
        ledger = history.at()
        assert ledger is not None
        if 0 <= draw < len(ledger):
            state = ledger.state(draw)
        elif life:
            state = "not drawn, since it was rewound"
        else:
            raise UserError(
                f"{history.path}: draw {draw} was not made; the ledger knows {len(ledger)}"
            )
    # Recovery: the draw's own lines can still be read.
    except DataError as error:
        state = f"in no one state, the journal contradicts itself: {error}"
    yield f"draw {draw}: {state}"
    for number, transition, detail, rewound_by in life:
        suffix = "" if detail is None else f" ({NAMES[transition]} {detail})"
        suffix += "" if rewound_by is None else f", rewound by line {rewound_by}"
        yield f"  line {number:<8} {transition}{suffix}"
