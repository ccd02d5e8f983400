"""A collector of its own for each test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from collector_kit import PROMPTS, Runner

from rlcore.data.prompts import PromptStream
from rlcore.runs.versions import Version
from rollout.accounting.prompt_queue import PromptQueue
from rollout.collection.buffer import PublishedVersions
from rollout.collection.collector import Collector
from rollout.collection.filters import FilterChain


@pytest.fixture
def make(make_config) -> Callable[..., tuple[Collector, PromptQueue, Runner]]:
    """Version v is policy step v - 1."""

    def made(
        runner: Runner, publications: int = 5, reward: dict[str, Any] | None = None, **rollout: Any
    ) -> tuple[Collector, PromptQueue, Runner]:
        config = make_config(
            rollout={"max_staleness": 1, "prompts_per_step": 1, "samples_per_prompt": 1, **rollout},
            reward=reward or {},
        )
        queue = PromptQueue(range(PROMPTS), PromptStream(PROMPTS, seed=1))
        versions = PublishedVersions()
        for step in range(publications):
            versions.add(Version(step + 1, step, 0))
        filters = FilterChain(config.rollout.filters, samples_per_prompt=2)
        collector = Collector(
            config, queue, runner, filters, versions, steps=100, busy_seconds=lambda: 0.0
        )
        return collector, queue, runner

    return made
