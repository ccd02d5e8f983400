"""The contract test of engines: our engines keep it, and each broken engine fails at its rule."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_kit import remote_engine
from fake_engine import FakeEngine, random_reply
from transformers import Qwen3ForCausalLM

from rlcore.config import Config
from rlcore.config.engine_registry import EngineKind
from rlcore.data.generation import Completion, GenerateRequest
from rlcore.data.sample import VersionSpan
from rlcore.errors import EngineFailed
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.engines.embedded.model_weights import as_published
from rollout.engines.testing import ContractError, check_engine, session
from rollout.engines.testing.rules import RULES

LONG = 500
NO_MODEL = "the fake has no model: it holds no weights, and answers at once"
FAKE_SKIPS = (
    "start",
    "pause-drain",
    "pause-hold",
    "abort",
    "progress",
    "updates",
    "kill",
    "bad-request",
)


@pytest.fixture
def config(folder: Path) -> Config:
    limits = {"request_timeout_s": 20.0, "update_timeout_s": 5.0, "start_timeout_s": 300.0}
    return Config.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": str(folder), "dtype": "fp32"},
            "data": {"paths": "none.jsonl"},
            "training": {"steps": 1},
            "rollout": {"engine": {"device": "cpu", "threads": 1, **limits}},
        }
    )


@pytest.fixture
def check(config: Config, model: Qwen3ForCausalLM) -> Callable[..., Any]:
    def check(engine: Any, **options: Any) -> Any:
        weights = {name: tensor.detach() for name, tensor in as_published(model)}
        return check_engine(engine, config=config, weights=weights, long=LONG, **options)

    return check


def embedded(config: Config, cls: type[EmbeddedEngine] = EmbeddedEngine) -> EmbeddedEngine:
    return cls(config.model.path, config=config.rollout.engine, dtype="fp32")


def test_the_embedded_engine_keeps_it(check: Callable[..., Any], config: Config) -> None:
    report = check(lambda: embedded(config))
    assert len(report.kept) == len(RULES) + 1
    assert "keeps 15 rules, 0 skipped" in str(report)


@pytest.mark.rest
def test_the_embedded_engine_in_its_own_process_keeps_it(
    check: Callable[..., Any], config: Config, tmp_path: Path
) -> None:
    report = check(
        lambda: remote_engine(config.model.path, config=config.rollout.engine, log=tmp_path / "log")
    )
    assert report.skipped == {}


def test_the_fake_keeps_what_needs_no_model(check: Callable[..., Any], config: Config) -> None:
    class Fake(FakeEngine):
        async def health(self) -> dict[str, Any]:
            health = await super().health()
            return health | {"version": self.version or None}

        async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
            assert self.version > 0
            return await super().generate(requests)

    skip = dict.fromkeys(FAKE_SKIPS, NO_MODEL)
    report = check(lambda: Fake(random_reply(31)), skip=skip)
    assert {rule.name for rule in report.skipped} == set(FAKE_SKIPS)


def each(engine: type[EmbeddedEngine], change: Callable[[Completion], Completion]) -> Any:
    """An engine that changes every completion."""

    class Changed(engine):
        async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
            answers = await super().generate(requests)
            return [[change(completion) for completion in made] for made in answers]

    return Changed


class OutOfOrder(EmbeddedEngine):
    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        return (await super().generate(requests))[::-1]


class HasAVersionAtOnce(EmbeddedEngine):
    async def health(self) -> dict[str, Any]:
        return await super().health() | {"version": self.version or 0}


class HasNoVersion(EmbeddedEngine):
    async def health(self) -> dict[str, Any]:
        return await super().health() | {"version": None}


class AnswersWithoutWeights(EmbeddedEngine):
    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        if self.version is None:
            nothing = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "length", ())
            return [[nothing] * request.n for request in requests]
        return await super().generate(requests)


class TakesUpdatesUnpaused(EmbeddedEngine):
    async def begin_update(self, buckets: Any) -> None:
        self._started()[1].begin(buckets)


class CountsNoBuckets(EmbeddedEngine):
    async def end_update(self) -> None:
        self._started()[1].received_all()
        await super().end_update()


class GoesBack(EmbeddedEngine):
    async def set_version(self, version: int) -> None:
        self._started()[1].version = None
        await super().set_version(version)


class DoesNotHold(EmbeddedEngine):
    async def pause(self, mode: Any) -> None:
        if mode in ("drain", "abort"):
            await super().pause(mode)


class StandsStill(EmbeddedEngine):
    async def progress(self) -> int | None:
        return None if await super().progress() is None else 1


class DoesNotDrain(EmbeddedEngine):
    async def pause(self, mode: Any) -> None:
        await super().pause("in_place" if mode == "drain" else mode)


class DoesNotAbort(EmbeddedEngine):
    async def pause(self, mode: Any) -> None:
        await super().pause("drain" if mode == "abort" else mode)


class RefusesWhilePaused(EmbeddedEngine):
    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        if self._gate.mode is not None:
            raise EngineFailed(f"{self.name} is paused")
        return await super().generate(requests)


class KeepsItsWeights(EmbeddedEngine):
    async def kill(self) -> None:
        pass


class Forgets(EmbeddedEngine):
    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        def forget(one: GenerateRequest) -> GenerateRequest:
            left = one.sampling.max_new_tokens - len(one.made(0))
            return replace(one, prefixes=(), sampling=replace(one.sampling, max_new_tokens=left))

        return await super().generate([forget(request) for request in requests])


class Random(EmbeddedEngine):
    calls = 0

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        self.calls += 1
        return await super().generate([replace(one, seed=self.calls) for one in requests])


class BlamesItself(EmbeddedEngine):
    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        try:
            return await super().generate(requests)
        except ValueError as error:
            raise EngineFailed(str(error)) from error


class Hangs(EmbeddedEngine):
    async def resume(self) -> None:
        await asyncio.Event().wait()


WIDE = each(EmbeddedEngine, lambda one: replace(one, logprobs=one.logprobs.astype(np.float64)))
LONG_TOKENS = each(EmbeddedEngine, lambda one: replace(one, tokens=one.tokens.astype(np.int64)))
ONE_LOGPROB_LESS = each(EmbeddedEngine, lambda one: replace(one, logprobs=one.logprobs[1:]))
NO_REASON = each(EmbeddedEngine, lambda one: replace(one, finish_reason="length"))


def without_stop_token(one: Completion) -> Completion:
    if one.finish_reason != "stop":
        return one
    kept = len(one.tokens) - 1
    spans = tuple(VersionSpan(span.version, 0, kept) for span in one.versions[:1] if kept)
    return replace(one, tokens=one.tokens[:-1], logprobs=one.logprobs[:-1], versions=spans)


DROPS_STOP_TOKEN = each(EmbeddedEngine, without_stop_token)
OLD_VERSION = each(
    EmbeddedEngine,
    lambda one: replace(
        one,
        versions=tuple(
            VersionSpan(first.version, 0, len(one.tokens)) for first in one.versions[:1]
        ),
    ),
)
NEXT_VERSION = each(
    EmbeddedEngine, lambda one: replace(one, versions=(VersionSpan(99, 0, len(one.tokens)),))
)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (HasAVersionAtOnce, "start"),
        (AnswersWithoutWeights, "start"),
        (HasNoVersion, "publication"),
        (OutOfOrder, "completions"),
        (LONG_TOKENS, "completions"),
        (WIDE, "completions"),
        (ONE_LOGPROB_LESS, "completions"),
        (NEXT_VERSION, "completions"),
        (NO_REASON, "finish-reasons"),
        (DROPS_STOP_TOKEN, "completions"),
        (Forgets, "prefixes"),
        (Random, "repeatable"),
        (BlamesItself, "bad-request"),
        (DoesNotDrain, "pause-drain"),
        (RefusesWhilePaused, "pause-drain"),
        (DoesNotHold, "pause-hold"),
        (StandsStill, "progress"),
        (DoesNotAbort, "abort"),
        (OLD_VERSION, "mixed-versions"),
        (TakesUpdatesUnpaused, "updates"),
        (CountsNoBuckets, "updates"),
        (GoesBack, "updates"),
        (KeepsItsWeights, "kill"),
    ],
)
@pytest.mark.rest
def test_a_broken_engine_fails_at_its_rule(
    broken: type[EmbeddedEngine], rule: str, check: Callable[..., Any], config: Config
) -> None:
    with pytest.raises(ContractError) as raised:
        check(lambda: embedded(config, broken))
    assert raised.value.rule.name == rule, str(raised.value)
    lines = str(raised.value).splitlines()
    assert "'engine-0' breaks the rule" in lines[0]
    assert lines[1].startswith("  got ")
    assert any(line.startswith("  expected ") for line in lines)
    assert lines[-1].startswith("  to do: ")


def test_a_call_that_hangs_breaks_the_deadlines(
    check: Callable[..., Any], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    within = session.Session._within

    def only_resume_is_late(self: Any, what: str, work: Any, seconds: float | None = None) -> Any:
        return within(self, what, work, seconds if what == "resume" else 60.0)

    monkeypatch.setattr(session.Session, "_within", only_resume_is_late)
    monkeypatch.setattr(session, "TRANSPORT_GRACE_S", 0.1)
    config.rollout.engine.request_timeout_s = 0.5
    config.rollout.engine.update_timeout_s = 0.5
    with pytest.raises(ContractError, match="resume still runs") as raised:
        check(lambda: embedded(config, Hangs))
    assert raised.value.rule.name == "deadlines"


def test_rules_that_do_not_apply_are_told(check: Callable[..., Any], config: Config) -> None:
    all_but_start = {rule.name: "not today" for rule in RULES if rule.name != "start"}
    report = check(lambda: embedded(config), kind=EngineKind(), skip=all_but_start)
    assert [rule.name for rule in report.kept] == ["start", "deadlines"]
    with pytest.raises(ValueError, match="no rule 'strat'"):
        check(lambda: embedded(config), skip={"strat": "misspelled"})
