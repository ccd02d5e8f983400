"""Hosts the rollout service in a child process of rank 0, and answers the calls of rank 0."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
from collections.abc import Callable, Sequence
from logging.handlers import MemoryHandler
from typing import TYPE_CHECKING, Any

from rlcore.config import Config
from rlcore.config.secrets import hide_secrets
from rlcore.data.batch import StepRollouts
from rlcore.errors import RunFailed
from rlcore.interfaces import RolloutEngine
from rlcore.launch.engines import build_engines, check_reachable
from rlcore.launch.logs import log_folder, open_log
from rlcore.launch.run_folder import record_timeline
from rlcore.launch.service.frames import Begin, OpenedService
from rlcore.timeline.recorder import RECORDER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollout.fleet.engine_memory import FleetMemory
    from rollout.service import RolloutService

# This descriptor leads to the log of the service; `sys.stderr` leads to rank 0.
STDERR = 2


def build_service(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    engines: Sequence[RolloutEngine],
    *,
    greedy_baseline: bool,
) -> tuple[RolloutService, FleetMemory]:
    """Make the rollout service and its `EngineMemory` in this process, without starting them."""
    from rlcore.data.loading import load_prompts
    from rollout.fleet.engine_memory import FleetMemory
    from rollout.service import RolloutService

    prompts = load_prompts(config, tokenizer)
    service = RolloutService(config, tokenizer, engines, prompts, greedy_baseline=greedy_baseline)
    return service, FleetMemory(service.fleet, config.rollout.engine, service.thread)


class ServiceHost:
    """Holds the `RolloutService`. A call that waits for rollouts blocks no other call.

    Args:
        early: the log records of this process so far.
    """

    def __init__(self, begin: Begin, early: MemoryHandler) -> None:
        hide_secrets(begin.config.model_dump())
        self._begin = begin
        self._config = begin.config
        self._early = early
        self._service: RolloutService | None = None
        self._memory: FleetMemory | None = None

    async def beat(self) -> None:
        """Answer at once. A hanging process cannot, and writes its stacks at half the limit."""
        limit_s = self._config.cluster.heartbeat_timeout_s
        faulthandler.dump_traceback_later(limit_s / 2, file=STDERR)

    async def open(self) -> OpenedService:
        """Read and check the input of the service. Raises the UserErrors of `RolloutService`."""
        self._service, self._memory = await asyncio.to_thread(self._build)
        prompts = self.service.prompts
        return OpenedService(len(prompts), prompts.lengths)

    def _build(self) -> tuple[RolloutService, FleetMemory]:
        from rlcore.data.tokenizer import load_tokenizer
        from rlcore.runs.state import seed_rng

        config = self._config
        seed_rng(config.run.seed)
        engines = build_engines(config)
        check_reachable(engines, config)
        tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
        baseline = self._begin.greedy_baseline
        return build_service(config, tokenizer, engines, greedy_baseline=baseline)

    async def start(self) -> None:
        """Start engines and reward workers, and write to the folder of the run from now on."""
        handler = open_log(log_folder(self._config.run) / "service.log")
        for descriptor in (1, STDERR):
            os.dup2(handler.stream.fileno(), descriptor)
        self._early.setTarget(handler)
        self._early.flush()
        logging.getLogger().removeHandler(self._early)
        logging.getLogger().addHandler(handler)
        record_timeline(self._config, "service")
        await asyncio.to_thread(self.service.start, again=self._begin.again)

    async def source(self, method: str, *arguments: Any) -> Any:
        """Call a method of `RolloutSource`."""
        found = await asyncio.to_thread(self._method(self.service, method), *arguments)
        if method == "restore":
            RECORDER.begin(self.service.ledger.last_step)
        # No rollouts follow the last step.
        if method == "published":
            RECORDER.flush(arguments[0])
        return found

    async def next_step(self, step: int) -> tuple[StepRollouts, dict[str, Any]] | None:
        """Return the rollouts of a step, and the state from which a replacement continues."""
        found = await self.source("next_step", step)
        if found is not None:
            RECORDER.flush(step)
        return None if found is None else (found, await self.source("snapshot"))

    async def memory(self, method: str, *arguments: Any) -> Any:
        """Call a method of `EngineMemory`."""
        return await asyncio.to_thread(self._method(self._memory, method), *arguments)

    async def publication(self, method: str, *arguments: Any) -> Any:
        """Call a method of `WeightPublication`, on the service's own loop."""
        work = self._method(self.service.publication, method)(*arguments)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.service.loop))

    async def close(self) -> None:
        """End the service, its engines and the timeline."""
        if self._service is not None:
            await asyncio.to_thread(self._service.close)
        RECORDER.close()

    # --- helpers ----------------------------------------------------------------------------------

    @property
    def service(self) -> RolloutService:
        """The service, once it is open."""
        assert self._service is not None, "open comes first"
        return self._service

    @staticmethod
    def _method(of: Any, name: str) -> Callable[..., Any]:
        method = getattr(of, name, None)
        if not callable(method):
            raise RunFailed(f"the rollout service knows no call {name!r}")
        return method  # type: ignore[no-any-return]
