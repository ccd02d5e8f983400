"""Conversations over two real servers, of an environment with tools and of an agent program.

Each stays on the server that has its beginning, which computes only what is new.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import server_kit
import torch
from server_kit import Served

from rlcore.data.generation import Completion, GenerateRequest
from rlcore.runs.directory import RunDirectory
from rollout.accounting.audit import audit
from rollout.engines.factories import ADMIN_KEY, API_KEY
from rollout.engines.sglang.engine import SGLangEngine
from tests.integration import calculator_kit
from tests.integration.accounting_checks import samples_of
from tests.integration.hf_logprobs import gaps_by_version
from tests.integration.workspace import Run, Workspace

GAP = "rollout/train_rollout_logprob_diff"
RUNS = {"env": calculator_kit.ENV_RUN, "agent": calculator_kit.AGENT_RUN}
STEPS = 2
# Four rollouts of a prompt begin at each server: too few for a server to be much busier than the
# other, so that no conversation moves.
PROMPTS = 2
SAMPLES = 4
pytestmark = pytest.mark.timeout(1200)  # two servers start in a fixture, on a machine with others


@dataclass(frozen=True)
class Turn:
    """A request of one turn, with the answer of the engine that it went to."""

    engine: str
    request: GenerateRequest
    answer: Completion

    @property
    def known(self) -> int:
        """How many tokens this engine has computed: the last one was drawn and never fed."""
        return len(self.request.prompt) + len(self.answer.tokens) - 1


@dataclass(frozen=True)
class Recorded:
    """A run, what was said in it, and the weights with which it began."""

    run: Run
    conversations: list[list[Turn]]
    start: Path


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Workspace]:
    yield Workspace(tmp_path_factory.mktemp("workspace"), tiny_model)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the example's data, and a small model that has seen a few conversations."""
    folder = tmp_path_factory.mktemp("calculator")
    calculator_kit.make_data(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(calculator_kit.CALCULATOR))
        patch.syspath_prepend(str(calculator_kit.AGENT))
        calculator_kit.warm_up(workspace, steps=200)
        yield folder


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[list[Served]]:
    """Two servers of the calculator's model."""
    model = folder / "build" / "calculator" / "model"
    logs = [folder / f"server_{number}.log" for number in range(2)]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        for name in (API_KEY, ADMIN_KEY):  # a run has one key for all its engines
            patch.setenv(name, f"{name}-of-this-module")
        servers = [server_kit.managed(model, log) for log in logs]
        started = [*pool.map(server_kit.launch, servers)]
        yield started
        for served in started:
            server_kit.close(served)


@pytest.fixture(scope="module", params=["env", pytest.param("agent", marks=pytest.mark.full)])
def recorded(
    request: pytest.FixtureRequest, workspace: Workspace, folder: Path, two: Sequence[Served]
) -> Recorded:
    """Two steps of an environment, or of an agent program, over both servers."""
    turns: list[Turn] = []
    generate = SGLangEngine.generate

    async def spy(
        self: SGLangEngine, requests: Sequence[GenerateRequest]
    ) -> list[list[Completion]]:
        answers = await generate(self, requests)
        turns.extend(Turn(self.name, one, *found) for one, found in zip(requests, answers))
        return answers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SGLangEngine, "generate", spy)
        run = calculator_kit.train(
            workspace, request.param, *RUNS[request.param], f"training.steps={STEPS}",
            "evaluation=null", f"policy.checkpoint={calculator_kit.WARM}",
            f"rollout.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}",
            "policy.optimizer.lr=1e-3", "checkpoint.every=1", "rollout.engine.kind=sglang",
            "rollout.service=in_process",  # where its requests are noted
            f"rollout.engine.urls=[{two[0].url}, {two[1].url}]",
        )  # fmt: skip
    found: dict[tuple[int, int], list[Turn]] = {}
    for turn in turns:
        found.setdefault((turn.request.draw, turn.request.first_sample), []).append(turn)
    return Recorded(run, list(found.values()), folder / calculator_kit.WARM / "hf")


def test_each_trained_token_has_the_log_prob_of_transformers(
    workspace: Workspace, recorded: Recorded
) -> None:
    samples = [sample for step in range(1, STEPS + 1) for sample in samples_of(recorded.run, step)]
    assert max(sample.turns for sample in samples) > 1, "the warm-up was too short for calls"
    gaps = gaps_by_version(workspace, recorded.run, samples, start=recorded.start)
    assert len(gaps) == STEPS
    assert max(gaps.values()) < 1e-4, gaps


def test_a_run_over_conversations(recorded: Recorded) -> None:
    found = audit(RunDirectory(recorded.run.folder))
    assert found.contradictions == []
    assert found.states["consumed"] == PROMPTS * STEPS
    for step in range(1, STEPS + 1):
        row = recorded.run.rows[step]
        assert row[GAP] < 1e-4
        assert row["conversation/turns"] > 1
        assert row["conversation/merge_ratio"] == 1.0
        samples = samples_of(recorded.run, step)
        calls = [len(m.get("tool_calls") or ()) for s in samples for m in s.messages or ()]
        assert sum(calls) > 0


def test_a_conversation_stays_where_its_beginning_is(recorded: Recorded) -> None:
    """From its second turn on the engine computes what is new, and the last token before it."""
    assert len(recorded.conversations) == PROMPTS * SAMPLES * STEPS
    engines = []
    for turns in recorded.conversations:
        for before, turn in pairwise(turns):
            assert turn.engine == before.engine
            assert turn.answer.cached_tokens is not None
            assert before.known <= turn.answer.cached_tokens < len(turn.request.prompt)
            engines.append(turn.engine)
    assert set(engines) == {"engine-0", "engine-1"}


def test_what_an_engine_computed_is_measured(recorded: Recorded) -> None:
    by_address = {
        (turns[0].request.draw, turns[0].request.first_sample): turns
        for turns in recorded.conversations
    }
    for sample in (sample for step in (1, 2) for sample in samples_of(recorded.run, step)):
        turns = by_address[sample.draw, sample.index]
        assert [len(turn.request.prompt) for turn in turns] == [
            int(sample.loss_mask.nonzero()[0][span.start]) for span in sample.turn_spans
        ]
        cached = sum(turn.answer.cached_tokens or 0 for turn in turns)
        assert sample.measured["cached_tokens"] == cached
        sent = sum(len(turn.request.prompt) for turn in turns)
        assert sample.measured["prefilled_tokens"] == sent - cached
