"""Random transitions of draws, with crashes at any byte of the journal: the ledger balances."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlcore.data.curriculum import build_curriculum
from rlcore.data.curriculum.history import num_results
from rlcore.data.curriculum.stream import CurriculumStream
from rlcore.data.prompts import PromptStream
from rollout.accounting.audit import _check_curriculum, check_rows, check_steps
from rollout.accounting.journal_reader import read_journal
from rollout.accounting.prompt_queue import PromptQueue


def samples_of(draw: int) -> list[Any]:
    """Three scored samples of a draw, of which some are right."""
    rights = [draw % 2 == 0, draw % 3 == 0, draw % 5 == 0]
    return [
        SimpleNamespace(verdict=right, metadata={}, reward=0.0, rollout_id=number)
        for number, right in enumerate(rights)
    ]


def curriculum_stream(size: int, **options: Any) -> CurriculumStream:
    """A stream of `size` prompts with the curriculum of pass rates."""
    return CurriculumStream(
        PromptStream(size, seed=1, fingerprint="five"),
        build_curriculum("pass_rate", **options),
        memory=0.5,
        passes_at=None,
        lengths=np.ones(size, dtype=np.int64),
        sources=np.zeros(size, dtype=np.int64),
    )


class LedgerMachine(RuleBasedStateMachine):
    """A service that a trainer drives, and a model of it: the ledger at each cut that counts."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.jsonl"
        self.step = 0  # whose batch the trainer has
        # step -> the snapshot of its hand-over
        self.cuts: dict[int, dict[str, Any]] = {}
        self.checkpoint = 0  # of this step is the newest
        self.queue = self.fresh()
        self.queue.keep_journal(self.path)

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.queue.close()
            self.folder.cleanup()

    def fresh(self) -> PromptQueue:
        return PromptQueue((), PromptStream(5, seed=1, fingerprint="five"))

    def in_state(self, state: str) -> list[int]:
        return [
            draw for draw in self.queue.ledger.unsettled() if self.queue.ledger.state(draw) == state
        ]

    # --- transitions ------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def take(self, count: int) -> None:
        requeued = self.queue.ledger.requeued()
        taken = self.queue.take(count)
        assert taken[: len(requeued)] == requeued[:count]  # what came back goes first

    @precondition(lambda self: self.in_state("in flight"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        for draw in data.draw(
            st.lists(st.sampled_from(self.in_state("in flight")), min_size=1, unique=True)
        ):
            self.queue.finish(draw, samples_of(draw))

    @precondition(lambda self: self.in_state("finished"))
    @rule(data=st.data(), name=st.sampled_from(["zero_variance", "mine"]))
    def drop(self, data: st.DataObject, name: str) -> None:
        self.queue.drop(data.draw(st.sampled_from(self.in_state("finished"))), name)

    @precondition(lambda self: self.in_state("in flight"))
    @rule(data=st.data(), kind=st.sampled_from(["error", "timeout"]))
    def fail(self, data: st.DataObject, kind: str) -> None:
        self.queue.fail(data.draw(st.sampled_from(self.in_state("in flight"))), kind)

    @precondition(lambda self: self.queue.ledger.unsettled())
    @rule(data=st.data(), reason=st.sampled_from(["", "stale"]))
    def give_back(self, data: st.DataObject, reason: str) -> None:
        self.queue.give_back(data.draw(st.sampled_from(self.queue.ledger.unsettled())), reason)

    @precondition(lambda self: self.in_state("finished"))
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        chosen = data.draw(
            st.lists(st.sampled_from(self.in_state("finished")), min_size=1, unique=True)
        )
        self.step += 1
        self.queue.hand_over(sorted(chosen), self.step)
        self.cuts[self.step] = json.loads(json.dumps(self.queue.snapshot()))

    @rule()
    def save(self) -> None:
        self.checkpoint = self.step

    # --- what ends it -----------------------------------------------------------------------------

    def go_on(self, queue: PromptQueue, state: dict[str, Any] | None, step: int) -> None:
        if state is not None:
            queue.restore(state)
            assert json.loads(json.dumps(queue.snapshot())) == state
        queue.give_back_unsettled()
        queue.keep_journal(self.path)
        self.queue = queue
        self.step = step
        self.cuts = {at: cut for at, cut in self.cuts.items() if at <= step}
        if state is not None:
            assert self.queue.ledger.consumed() == read_journal(self.path).at(step).consumed()

    @rule(share=st.floats(0, 1))
    def everything_dies(self, share: float) -> None:
        """At any byte that a machine may have kept of the file; the checkpoint is whole."""
        # as a kill does: entries that are not written are lost
        self.queue.journal._release()
        content = self.path.read_bytes()
        self.path.write_bytes(content[: round(share * len(content))])
        self.go_on(self.fresh(), self.cuts.get(self.checkpoint), self.checkpoint)
        # What a journal has lost of cuts before the checkpoint's it cannot be asked for any more.
        self.cuts = {at: cut for at, cut in self.cuts.items() if at in read_journal(self.path).cuts}

    @rule()
    def the_trainer_dies(self) -> None:
        """The service goes back with it."""
        queue = self.queue
        state = self.cuts.get(self.checkpoint)
        self.go_on(queue, queue.beginning() if state is None else state, self.checkpoint)

    @rule()
    def the_service_dies(self) -> None:
        """The trainer goes on with another, from the state that came with the newest hand-over."""
        self.queue.journal._release()
        self.go_on(self.fresh(), self.cuts.get(self.step), self.step)

    # --- what always holds ------------------------------------------------------------------------

    @invariant()
    def balanced(self) -> None:
        self.queue.journal.flush()
        history = read_journal(self.path)
        ledger = self.queue.ledger
        stream = self.queue.stream
        assert history.at().snapshot() == ledger.snapshot()
        assert list(check_steps(history)) == []
        assert sum(ledger.balance().values()) == len(ledger) == stream.cursor
        assert stream.snapshot()["requeued"] == ledger.requeued()
        assert ledger.last_step == self.step
        for step, cut in self.cuts.items():
            assert history.at(step).snapshot() == cut["ledger"]


class CurriculumMachine(LedgerMachine):
    """The same with a curriculum, whose choices and results the journal knows."""

    def fresh(self) -> PromptQueue:
        return PromptQueue((), curriculum_stream(5))

    @invariant()
    def chosen_once(self) -> None:
        history = read_journal(self.path)
        assert list(check_rows(history)) == []
        stream = self.queue.stream
        ledger = self.queue.ledger
        rows = {}
        results = 0
        known = True  # a journal that was cut off may have lost some
        for _, entry in history.entries():
            rows |= dict(zip(entry.get("drawn", ()), entry.get("rows", ())))
            results += len(entry.get("passed", ()))
            known = known and "ledger" not in entry
        saved = stream.snapshot()["curriculum"]
        assert [draw for draw, _ in saved["rows"]] == sorted(
            [*ledger.unsettled(), *ledger.requeued()]
        )
        for draw, row in saved["rows"]:
            assert row == stream.row(draw) == rows.get(draw, row)
            assert draw in rows or not known
        if known:
            assert num_results(saved["results"]) == results
        assert sum(stream._results.seen) == num_results(saved["results"])
        for step, cut in list(self.cuts.items())[-1:]:
            name = f"step {step}"
            found = _check_curriculum(name, cut["stream"]["curriculum"], history, step)
            assert list(found) == []


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
CurriculumMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None
)
TestCurriculumMachine = CurriculumMachine.TestCase
