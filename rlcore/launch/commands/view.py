"""`rlcore view RUN ...`: a local page on runs, or a file with the page and its data."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.launch.signals import handling_stop_signals
from rlcore.terminal import printable
from rlcore.view.api import Api, Parameters
from rlcore.view.export import export_page
from rlcore.view.run import RunView
from rlcore.view.server import ViewServer
from rollout.accounting.journal_reader import History

MAX_EVENTS = 2000  # events that a page lists


class RunApi(Api):
    """Answers the page about ledgers too, whose format the package `rollout` knows."""

    def __init__(self, runs: Sequence[RunView], *, follow: bool) -> None:
        super().__init__(runs, follow=follow)
        self._histories = {run.name: History(run.directory.ledger_path) for run in runs}
        # Several requests may read the same ledger.
        self._lock = threading.Lock()

    def _history(self, asked: Parameters) -> History:
        run = self.run(asked)
        run.inside(run.directory.ledger_path)
        history = self._histories[run.name]
        history.refresh()
        return history

    def find_ledger(self, asked: Parameters) -> Any:
        """Return counts by reason, and the newest draws that were given up or requeued."""
        with self._lock:
            history = self._history(asked)
            newest = list(history.dropped)[-MAX_EVENTS:][::-1]
            return {
                "restarts": len(history.starts[1:]),
                "counts": [[*why, count] for why, count in history.dropped_counts.items()],
                "events": [event._asdict() for event in newest],
            }

    def find_draw(self, asked: Parameters) -> Any:
        """Return the transitions of a draw, by line of the journal."""
        names = ("line", "what", "detail", "rewound_by")
        with self._lock:
            life = self._history(asked).life(asked.whole("draw"))
            return [dict(zip(names, moment)) for moment in life]


def view_runs(
    paths: Sequence[Path], *, port: int, follow: bool, export: Path | None, step: int | None
) -> int:
    """Serve the page until Ctrl-C, or write it to `export`; return the exit code.

    Args:
        step: the step to export; default: the newest of each run.

    Raises:
        UserError: a folder is not a run, or the port is taken.
    """
    runs = [RunView(name, path) for name, path in named(paths).items()]
    api = RunApi(runs, follow=follow)
    if export is not None:
        print(printable(export_page(api, export, step=step)))
        return 0
    for run in runs:
        # Read the metrics before the page requests them.
        threading.Thread(target=run.metrics.refresh, daemon=True).start()
    try:
        server = ViewServer(api, port=port)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise UserError(f"--port {port}: {why}; another one, or 0 for a free one") from error
    print("\n".join(greeting(server)), flush=True)
    with handling_stop_signals(signal.default_int_handler):
        try:
            server.serve()
        except KeyboardInterrupt:
            print("", file=sys.stderr)
    return 0


def named(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the runs by name; a duplicate name gets its folder's name appended."""
    found: dict[str, Path] = {}
    for full, path in {path.resolve(): path for path in paths}.items():
        name = full.name
        if name in found:
            name = f"{full.parent.name}/{name}"
        while name in found:
            name += "'"
        found[name] = path
    return found


def greeting(server: ViewServer) -> list[str]:
    """Return the lines with the address of the page."""
    lines = [f"rlcore view: {server.url}"]
    if os.environ.get("SSH_CONNECTION"):
        tunnel = f"ssh -N -L {server.port}:127.0.0.1:{server.port}"
        user = os.environ.get("USER") or "USER"
        lines.append(
            f"  from your own machine first: {tunnel} {user}@{socket.gethostname()}"
            "   (then open the address above there)"
        )
    return [*lines, "  the address is a key to these runs; Ctrl-C ends it"]
