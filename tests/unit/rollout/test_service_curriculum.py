"""A service with a curriculum: what it is told of results, and what a restart keeps of choices."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from ahead_kit import Continuous, publish, rollout, wait_until
from fake_engine import FakeEngine, addresses, random_reply

from rlcore.algorithms.metric_table import metric_spec
from rlcore.data.curriculum import PromptHistory
from rlcore.errors import ConfigError, RunFailed
from rlcore.launch.commands.init_model import ALPHABETS, char_tokenizer
from rollout.accounting.journal_reader import read_journal

TOKENIZER = char_tokenizer(ALPHABETS["addition"])
PASS_RATE = {"curriculum": {"name": "pass_rate"}}
SECTION = {"prompts_per_step": 3}


class InOrder:
    """The prompts with the fewest groups, and of these the first."""

    def __call__(self, history: PromptHistory) -> np.ndarray[Any, Any]:
        fewest = history.seen == history.seen.min()
        return np.where(fewest, 1e12 ** -np.arange(len(history), dtype=float), 0.0)


class Broken:
    def __call__(self, history: PromptHistory) -> np.ndarray[Any, Any]:
        return np.full(len(history), np.nan)


def journal_rows(path) -> dict[int, int]:
    rows: dict[int, int] = {}
    for _, entry in read_journal(path).entries():
        rows |= dict(zip(entry.get("drawn", ()), entry.get("rows", ())))
    return rows


def test_prompts_that_are_solved_sometimes_come_more_often(make_service, tmp_path):
    def knows(request, sample):
        """Sums with 4 are solved by one sample of two, all others by both."""
        text = TOKENIZER.decode(request.prompt.tolist())
        a, b = text.rstrip("=").split("+")
        wrong = sample % 2 == 1 and "4" in text
        return [*TOKENIZER(str(int(a) + int(b) + wrong)).input_ids, TOKENIZER.eos_token_id]

    curriculum = {"curriculum": {"name": "pass_rate", "floor": 0.02}}
    service = make_service(engines=[FakeEngine(knows)], data=curriculum)
    service.keep_ledger(tmp_path / "ledger.jsonl")
    found: Counter[str] = Counter()
    for step in range(1, 41):
        rollouts = service.next_step(step)
        assert len({sample.prompt_text for sample in rollouts.samples}) == 4, "none twice"
        found.update(sample.prompt_text for sample in rollouts.samples if step > 10)
    sometimes = {text: count for text, count in found.items() if "4" in text}
    assert len(sometimes) == 4  # 4+0= to 4+3=
    assert sum(sometimes.values()) > 0.8 * found.total()
    row = rollouts.metrics
    assert row["curriculum/seen"] == 1.0
    assert row["curriculum/never_right"] == 0.0
    assert row["curriculum/always_right"] == pytest.approx(16 / 20)
    assert row["curriculum/effective_prompts"] < 6
    assert [name for name in row if metric_spec(name) is None] == []
    # the prompt of a sample is the one that the journal says
    rows = journal_rows(tmp_path / "ledger.jsonl")
    for sample in rollouts.samples:
        assert service.prompts[rows[sample.draw]].text == sample.prompt_text
    assert rollouts.epoch == pytest.approx(160 / 20)


@pytest.mark.parametrize("filters", [[], ["user_parts:even_draws"]])
def test_a_resumed_service_chooses_as_the_undisturbed_one(make_service, filters):
    given = {"rollout": {**SECTION, "filters": filters, "oversample": 1.5}, "data": PASS_RATE}
    service = make_service(**given)
    steps = [service.next_step(step) for step in range(1, 13)]
    plain = make_service(rollout=given["rollout"])
    expected = [plain.next_step(step) for step in range(1, 13)]
    assert [addresses(s) for s in expected] != [addresses(s) for s in steps]
    for at in (1, 4, 9):
        resumed = make_service(**given)
        resumed.restore(json.loads(json.dumps(steps[at - 1].snapshot)))
        again = [resumed.next_step(step) for step in range(at + 1, 13)]
        assert [addresses(s) for s in again] == [addresses(s) for s in steps[at:]]
        for one, other in zip(again, steps[at:]):
            assert curriculum_metrics(one) == curriculum_metrics(other) != {}
        assert again[-1].snapshot == steps[-1].snapshot


def curriculum_metrics(rollouts) -> dict[str, float]:
    return {k: v for k, v in rollouts.metrics.items() if k.startswith("curriculum/")}


def test_a_failure_is_told_to_the_curriculum(make_service):
    section = {**SECTION, "workflow": {"name": "user_parts:FailsOnce", "retries": 0}}
    at_any = {"curriculum": {"name": "pass_rate", "passes_at": 0.0}}
    engine = FakeEngine(random_reply(31))
    service = make_service(engines=[engine], rollout=section, data=at_any)
    told = service.next_step(1).snapshot["stream"]["curriculum"]
    assert service.ledger.state(2) == "failed"
    assert told["results"]["failed"] == [[service._queue.stream.row(2), 1]]
    assert told["rows"] == [], "it does not come again"


def test_one_of_a_user_chooses(make_service):
    service = make_service(rollout=SECTION, data={"curriculum": {"name": f"{__name__}:InOrder"}})
    for step in range(1, 7):
        rows = {int(s.prompt_id.rpartition(":")[2]) - 1 for s in service.next_step(step).samples}
        assert rows == {3 * step - 3, 3 * step - 2, 3 * step - 1}


def test_a_broken_one_ends_the_run_and_a_wrong_one_does_not_begin_it(make_service):
    service = make_service(rollout=SECTION, data={"curriculum": {"name": f"{__name__}:Broken"}})
    with pytest.raises(
        RunFailed, match=r"data\.curriculum \(.*\.py:\d+ in __call__\) gave prompt 0 the weight"
    ):
        service.next_step(1)
    for section, said in (
        ({"name": "passrate"}, "data.curriculum: unknown curriculum 'passrate'"),
        ({"name": "pass_rate", "target": 2.0}, "data.curriculum: target: expected"),
        ({"name": "pass_rate", "flor": 0.1}, "data.curriculum: .*flor"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_service(rollout=SECTION, data={"curriculum": section})


def test_a_reward_without_a_verdict_is_refused_after_the_first_step(make_service):
    half = {"parts": {"half": {"function": "user_parts:half"}}}
    service = make_service(rollout=SECTION, data=PASS_RATE, reward=half)
    with pytest.raises(RunFailed, match=r"none of the 3 groups so far .* data\.curriculum\.passes"):
        service.next_step(1)
    at_half = {"curriculum": {"name": "pass_rate", "passes_at": 0.5}}
    service = make_service(rollout=SECTION, data=at_half, reward=half)
    assert service.next_step(1).metrics["curriculum/always_right"] == 1.0


# --- ahead of the trainer -------------------------------------------------------------------------


@pytest.fixture
def engines() -> list[Continuous]:
    return [Continuous(random_reply(31), name=name) for name in "ab"]


def rows_in(service) -> dict[int, int]:
    stream = service._queue.stream
    return {draw: stream.row(draw) for draw in range(stream.cursor)}


def test_a_resumed_service_trains_on_groups_of_the_chosen_prompts(make_service, engines):
    given = {"rollout": rollout(2), "training": {"steps": 6}, "data": PASS_RATE}
    service = make_service(engines=engines, **given)
    publish(service, engines, 0)
    wait_until(lambda: service.ledger.balance()["finished"] == 12)
    service.next_step(1)
    state = json.loads(json.dumps(service.snapshot()))
    resumed = make_service(engines=engines, **given)
    resumed.restore(state)
    publish(resumed, engines, 1, version=9)
    for step in range(2, 7):
        for sample in resumed.next_step(step).samples:
            row = resumed._queue.stream.row(sample.draw)
            assert sample.prompt_id == resumed.prompts[row].prompt_id
        publish(resumed, engines, step, version=9 + step)
    assert resumed.ledger.balance()["consumed"] == 24
