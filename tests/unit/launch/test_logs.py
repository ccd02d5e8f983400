"""What of a record is written to a log, and what is shown on the terminal."""

from __future__ import annotations

import faulthandler
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.config.secrets import MASK
from rlcore.config.sections.training import RunConfig
from rlcore.launch.logs import Terminal, describe_failure, open_log, rank_log_path
from rlcore.trainer.rank_sync import Failure

NAMED = "trainer rank 1 failed: it was killed by SIGKILL"
URL = "http://user:hidden@10.0.0.7:1"


def record(message: str, *values: object, error: Exception | None = None) -> logging.LogRecord:
    trace = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("rlcore.x", logging.WARNING, __file__, 1, message, values, trace)


def test_a_log_holds_no_password_of_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulthandler, "enable", lambda *_: None)
    monkeypatch.setattr(faulthandler, "register", lambda *_: None)
    log = open_log(tmp_path / "logs" / "rank_0.log")
    log.handle(record("asked %s", URL, error=ValueError(f"no answer of {URL}")))
    text = (tmp_path / "logs" / "rank_0.log").read_text()
    assert "hidden" not in text
    assert f"asked http://{MASK}@10.0.0.7:1\n" in text
    assert f"no answer of http://{MASK}@10.0.0.7:1" in text


def test_the_terminal_shows_no_password_and_is_not_steered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Terminal().handle(record("asked %s: %s", URL, "\x1b[2Jgone"))
    assert capsys.readouterr().err == f"warning: asked http://{MASK}@10.0.0.7:1: \\x1b[2Jgone\n"


def test_a_signal_writes_the_stack_of_every_thread_into_the_log(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    program = (
        "import os, signal, sys, threading\n"
        "from pathlib import Path\n"
        "from rlcore.launch.logs import open_log\n"
        "waits = threading.Event()\n"
        "def waits_for_nobody():\n"
        "    waits.set()\n"
        "    threading.Event().wait()\n"
        "threading.Thread(target=waits_for_nobody, daemon=True).start()\n"
        "waits.wait()\n"
        "open_log(Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(log)], timeout=60, check=True)
    text = log.read_text()
    assert "waits_for_nobody" in text
    assert "Current thread" in text


def test_a_failure_shows_the_end_of_its_log_and_names_none_that_is_not_there(
    tmp_path: Path,
) -> None:
    run = RunConfig(name="one", dir=str(tmp_path))
    killed = Failure(1, "it was killed by SIGKILL")
    assert describe_failure(killed, run) == NAMED
    path = rank_log_path(run, 1)
    path.parent.mkdir(parents=True)
    path.write_text("first\nlast\n")
    end = f"; the last lines of {path}:\n  last"
    new = "; it has no checkpoint yet: start it again with --overwrite"
    assert describe_failure(killed, run, lines=1) == NAMED + new + end
    for step in (4, 12):
        (tmp_path / "one" / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    resumed = "; continue after step 12 with --resume"
    assert describe_failure(killed, run, lines=1) == NAMED + resumed + end
    refused = Failure(1, "data.paths: no rows", bad_input=True)
    assert "--resume" not in describe_failure(refused, run), "nothing was trained"


def test_a_warning_to_a_terminal_that_has_gone_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = pty.openpty()
    os.close(ours)
    with os.fdopen(theirs, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        Terminal().handle(record("all is well"))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # what is left is flushed when the stream is closed
        os.close(nowhere)
