"""A service that its trainer has lost works on, while another has taken its place."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fake_engine import FakeEngine, random_reply

from rlcore.errors import RunFailed
from rollout.accounting.journal_reader import read_journal


def test_it_draws_no_more_and_leaves_the_ledger_to_the_other(make_service, tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    given = {"rollout": {"max_staleness": 2, "engine": {"kind": "sglang"}}}
    lost, other = (
        make_service(engines=[FakeEngine(random_reply(31), name=name)], **given) for name in "ab"
    )
    lost.keep_ledger(path)
    lost.published(0, 0, 0)
    deadline = time.monotonic() + 60
    while lost.ledger.balance()["finished"] < 12:
        assert time.monotonic() < deadline
        time.sleep(0.002)

    other.restore(None)  # nothing was handed over yet
    other.keep_ledger(path)
    before = path.read_bytes()
    lost.published(1, 1, 0)  # there is room for more
    with pytest.raises(RunFailed, match=r"another service writes .*/ledger\.jsonl: "):
        lost.next_step(1)
    lost.close()
    assert path.read_bytes() == before

    other.published(0, 0, 0)
    other.next_step(1)
    other.close()
    history = read_journal(path)
    assert history.at().snapshot() == other.ledger.snapshot()
    assert [at for _, at in history.starts] == [0, 0]
