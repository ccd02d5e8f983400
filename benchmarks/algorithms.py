"""Times the algorithms beside plain loops and public libraries, in one process (README.md)."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from estimators import balance, groups, peers, post, ppo
from estimators.race import Section
from process import busy_seconds
from report import machine

SECTIONS = {
    "ppo": ppo.measure,
    "groups": groups.measure,
    "post": post.measure,
    "balance": balance.measure,
}
PEERS = Path(__file__).resolve().parents[1] / ".venv-peers"


def main() -> None:
    """Print tables of times and goals. Exits with 0 whether or not the goals are reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--only", choices=SECTIONS, action="append", help="one section; may be repeated"
    )
    parser.add_argument(
        "--peers", type=Path, default=PEERS, help="folder that verl is imported from"
    )
    parser.add_argument(
        "--install-peers", action="store_true", help="put verl into that folder first (280 MB)"
    )
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if options.install_peers:
        peers.install(options.peers)
    verl, note = peers.verl(options.peers)
    where = {
        **machine(),
        "torch": torch.__version__,
        "threads": options.threads,
        "device": _name(device),
    }
    print(
        f"{where['cpu']}, {where['cores']} cores, {options.threads} threads, torch"
        f" {torch.__version__}, {where['device']}"
    )
    print(f"{note}. {peers.TRL_NOTE}.\n")

    started = time.monotonic()
    busy = busy_seconds()
    own = time.process_time()
    sections = []
    for name in options.only or SECTIONS:
        sections.append(SECTIONS[name](device, verl))
        print(_table(sections[-1]), flush=True)
    others = (busy_seconds() - busy - (time.process_time() - own)) / (time.monotonic() - started)
    print(f"Meanwhile other programs kept {max(others, 0.0):.2f} cores busy.")
    if options.json is not None:
        notes = {"peers": [note, peers.TRL_NOTE], "other_cores": max(others, 0.0)}
        options.json.write_text(
            json.dumps(
                {"machine": where, **notes, "sections": [_plain(s) for s in sections]}, indent=1
            )
        )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _table(section: Section) -> str:
    lines = [f"## {section.title}\n", section.note]
    for case in dict.fromkeys(row.case for row in section.rows):
        rows = [row for row in section.rows if row.case == case]
        cells = [
            [row.what, f"{row.median * 1e3:.3f}", f"{min(row.seconds) * 1e3:.3f}", row.agreement]
            for row in rows
        ]
        lines += ["", *_markdown([case, "median, ms", "least, ms", "numbers beside ours"], cells)]
    verdicts = [
        [
            g.text,
            f"{g.measured:.2f}",
            f"{'>=' if g.at_least else '<='} {g.limit:g}",
            "reached" if g.reached else "MISSED",
        ]
        for g in section.goals
    ]
    return "\n".join([*lines, "", *_markdown(["ratio", "measured", "goal", ""], verdicts), ""])


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in head[1:])]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def _plain(section: Section) -> dict[str, object]:
    return {
        "title": section.title,
        "note": section.note,
        "rows": [
            {
                "case": r.case,
                "what": r.what,
                "median_seconds": r.median,
                "least_seconds": min(r.seconds),
                "rounds": len(r.seconds),
                "agreement": r.agreement,
            }
            for r in section.rows
        ],
        "goals": [
            {
                "goal": g.text,
                "measured": g.measured,
                "limit": g.limit,
                "at_least": g.at_least,
                "reached": g.reached,
            }
            for g in section.goals
        ],
    }


if __name__ == "__main__":
    main()
