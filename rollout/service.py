"""The rollout service: prompts -> workflow -> engines -> reward -> filters -> the samples of a
step.

It is driven synchronously by the trainer's rank 0; everything asynchronous happens in one thread,
whose loop also carries the engine clients.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlcore.config import Config
from rlcore.config.derived import engine_place_s, total_steps
from rlcore.data.prompts import PromptStream
from rlcore.data.sample import Sample
from rlcore.data.step import StepRollouts
from rlcore.errors import ConfigError, DeadlineExceeded
from rlcore.interfaces import RolloutEngine
from rollout.accounting.prompt_queue import PromptQueue
from rollout.asyncio_utils import LoopThread, gather_or_cancel
from rollout.collection.buffer import BufferedGroup, decode
from rollout.collection.collector import Collector
from rollout.collection.errand import Errand
from rollout.collection.evaluation import Evaluation
from rollout.collection.filters import FilterChain
from rollout.collection.group_runner import Runners
from rollout.collection.load_prompts import load_prompts
from rollout.collection.lockstep_collector import StepCollector, StepGroups
from rollout.collection.published_versions import Publication, PublishedVersions
from rollout.engines.vocabulary import check_vocabulary
from rollout.fleet.dispatcher import Dispatcher
from rollout.fleet.fleet import Fleet
from rollout.rewards.build import build_scorer
from rollout.rewards.pool import START_TIMEOUT_S as REWARD_START_TIMEOUT_S

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
logger = logging.getLogger(__name__)

CLOSE_S = 30.0


class RolloutService:
    """Implements `rlcore.interfaces.RolloutSource`. Construction reads and checks; `start` starts
    engines and reward workers.

    Args:
        greedy_baseline: every prompt of a step gets one more response, at temperature 0 and for
            nothing but the `baseline_reward` of its samples: it is not among them, in no count of
            episodes, and no filter sees it.

    Raises:
        UserError: bad prompts, labels, rewards, filters or vocabulary sizes.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        engines: Sequence[RolloutEngine],
        *,
        greedy_baseline: bool = False,
    ) -> None:
        if not engines:
            raise ConfigError("the rollout service needs at least one engine")
        self._config = config
        self.fleet = Fleet(engines, config.rollout.engine, place_s=engine_place_s(config))
        vocab_size = check_vocabulary(config.model.path, tokenizer)
        self.prompts = load_prompts(config, tokenizer, config.data.paths)
        given = config.evaluation
        held_out = (
            load_prompts(config, tokenizer, given.paths, max_prompts=given.max_prompts)
            if given.paths
            else None
        )
        self._filters = FilterChain(
            config.rollout.filters, samples_per_prompt=config.rollout.samples_per_prompt
        )
        self._scorer = build_scorer(
            config.reward, vocab_size=vocab_size, device=config.rollout.engine.device
        )
        self._draws = PromptQueue(
            PromptStream(
                len(self.prompts),
                seed=config.run.seed,
                shuffle=config.data.shuffle,
                fingerprint=self.prompts.fingerprint(),
            )
        )
        self.ledger = self._draws.ledger
        self._dispatcher = Dispatcher(self.fleet, config.rollout.engine)
        runners = Runners(config, tokenizer, self._dispatcher, self._scorer)
        row_of = self._draws.stream.row
        self._training = runners.training(
            lambda draw: self.prompts[row_of(draw)], greedy_baseline=greedy_baseline
        )
        self._evaluation = (
            None
            if held_out is None
            else Evaluation(runners.evaluation(held_out.__getitem__), len(held_out))
        )
        self._versions = PublishedVersions()
        self._collector = self._build_collector()
        self._cut = self._collector.cut()  # of the newest step that the trainer was given
        self._restored_step = 0  # the last that was handed over before
        # that goes on while the trainer brings an engine its weights
        self._errand: Errand[Any] | None = None
        # seconds in which engines had worked when it began
        self._busy_before = 0.0
        self._seen = self._so_far()  # at the last hand-over
        self.thread = LoopThread("rollout")
        self.loop = self.thread.loop

    def start(self, *, again: bool = False) -> None:
        """Engines and reward workers answer when this returns.

        Args:
            again: in the place of a service that was lost; see `Fleet.start`.

        Raises:
            RunFailed: one of them did not start; the service is closed then.
        """
        limit = self.fleet.comeback_s + REWARD_START_TIMEOUT_S
        try:
            self._call(self._start(again), limit, "starting the engines and rewards")
        except BaseException:
            self.close()
            raise

    def _build_collector(self) -> StepCollector | Collector:
        parts = (self._config, self._draws, self._training, self._filters)
        if self._config.rollout.max_staleness == 0:
            return StepCollector(*parts)
        steps = total_steps(self._config, len(self.prompts))
        ahead = Collector(
            *parts, self._versions, steps=steps, busy_s=lambda: self._dispatcher.busy_s
        )
        self.fleet.router.on_room = ahead.room_changed
        return ahead

    async def _start(self, again: bool) -> None:
        await gather_or_cancel(self._scorer.start(), self.fleet.start(again=again))

    def _call(self, work: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        return self.thread.call(work, seconds=seconds, what=what)

    # --- training ---------------------------------------------------------------------------------

    def next_step(self, step: int) -> StepRollouts | None:
        """The samples of `step`: `prompts_per_step` groups that passed the filters, in the order of
        their draws.

        None when an engine waits for the weights; the groups are collected on, and the next call
        waits for the same ones.

        Raises:
            DeadlineExceeded: `rollout.timeout_s` or `rollout.engine.request_timeout_s`; names who
                was waited for.
            EmptyBatch: the filters leave too little.
            NoEngineLeft: none serves, and none can be started again.
            RunFailed: an engine or workflow failed.

        With `max_staleness` 0 the draws of a step that failed are requeued; else what failed since
        the last step is raised, and only its own draws are.
        """

        def stuck() -> str:
            limit = self._config.rollout.timeout_s
            return (
                f"step {step} has no rollouts after {limit:g} s (rollout.timeout_s):"
                f" {self._collector.stuck()}"
            )

        if self._errand is None:
            self._busy_before = self._dispatcher.busy_s
        try:
            errand = self._visit(
                lambda: self._collector.collect(step), stuck, f"the rollouts of step {step}"
            )
        except BaseException:
            self._collector.give_up()
            raise
        if errand is None:
            return None
        done: StepGroups = errand.result()
        self._cut = done.cut
        metrics = {
            "time/generation": errand.seconds,
            "time/engine": self._dispatcher.busy_s - self._busy_before,
            **done.metrics,
            **self._happened(),
            **self._became(done),
        }
        engines = self._dispatcher.engines_of(
            self._config.run.seed, [group.draw for group in done.groups]
        )
        steps = self._versions.of_samples(done.samples)
        return StepRollouts(done.samples, metrics, done.epoch, done.cut.draws, engines, steps)

    def published(self, step: int, version: int, incarnation: int) -> None:
        """Weights of policy step `step` are in force as `version`.

        No news where a later step was handed over before `restore`, which a service in the place of
        a lost one may be told of: nothing is made with them any more, and generation begins with
        the next.
        """

        async def published() -> None:
            if step < self._restored_step:
                return
            self._versions.add(Publication(version, step, incarnation))
            self._collector.published(step)

        self._call(published(), CLOSE_S, f"the news of version {version}")

    def _visit(
        self, work: Callable[[], Coroutine[Any, Any, Any]], stuck: Callable[[], str], what: str
    ) -> Errand[Any] | None:
        """`work`, done; None when an engine waits for weights before. Begun by the first visit,
        awaited by later ones.
        """
        if self._errand is None:
            limit = self._config.rollout.timeout_s
            self._errand = Errand(self.thread, work(), limit_s=limit, what=what, stuck=stuck)
        errand = self._errand
        try:
            if not errand.done_before(self.fleet.wait_for_stale):
                return None
        except BaseException:
            self._errand = None
            raise
        self._errand = None
        return errand

    def abandon(self) -> None:
        """Whoever asked is gone: the step or evaluation at hand is given up. From any thread."""
        if (errand := self._errand) is not None:
            self._errand = None
            errand.drop()

    def halt(self) -> None:
        """Nothing is in flight when this returns, and nothing begins before the next publication."""
        self._call(self._collector.halt(), CLOSE_S, "ending what is in flight")

    def _became(self, done: StepGroups) -> dict[str, float]:
        """PromptQueue that the step was not trained on."""
        return {
            "rollout/requeued_prompts": float(done.tally.requeued),
            "rollout/excluded_prompts": float(len(self.prompts.excluded)),
            **{
                f"rollout/dropped_{name}": float(done.tally.dropped[name])
                for name in self._filters.names
            },
        }

    def _happened(self) -> dict[str, float]:
        """Since the last hand-over; and how many engines there are."""
        before = self._seen
        self._seen = self._so_far()
        return {
            **{name: now - before[name] for name, now in self._seen.items()},
            "rollout/engines_serving": float(self.fleet.serving),
        }

    def _so_far(self) -> dict[str, float]:
        partial = self._training.partial
        failures = self._training.failures
        return {
            "rollout/reward_errors": float(failures.errors),
            "rollout/reward_timeouts": float(failures.timeouts),
            "rollout/engine_restarts": float(self.fleet.restarts),
            "rollout/retried_requests": float(self._dispatcher.retried),
            "rollout/resumed_responses": float(partial.resumed_responses),
            "rollout/resumed_tokens": float(partial.resumed_tokens),
        }

    # --- evaluation -------------------------------------------------------------------------------

    def evaluate(self) -> tuple[dict[str, float], list[Sample]] | None:
        """Score every evaluation prompt; ({}, []) when there are none. None when an engine waits
        for the weights.
        """
        evaluation = self._evaluation
        if evaluation is None:
            return {}, []

        def stuck() -> str:
            limit = self._config.rollout.timeout_s
            return (
                f"the evaluation has not ended after {limit:g} s (rollout.timeout_s):"
                f" {evaluation.stuck()}"
            )

        errand = self._visit(evaluation.run, stuck, "the evaluation")
        if errand is None:
            return None
        scored: tuple[dict[str, float], list[Sample]] = errand.result()
        return scored

    # --- state ------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Of the newest hand-over that the trainer knows of: another may follow while it brings an
        engine its weights.
        """
        return self._cut.encoded()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a snapshot; draws that were in flight when it was taken are drawn again.

        Raises:
            DataError: the prompts are not those of the snapshot.
        """
        state = self._draws.beginning() if state is None else state
        # here: a large buffer would hold up the loop
        kept = decode(state.get("ahead", {}).get("groups", ()))
        self._call(self._restore(state, kept), CLOSE_S, "restoring the rollout service")

    async def _restore(self, state: Mapping[str, Any], kept: Sequence[BufferedGroup]) -> None:
        await self._collector.halt()
        self._collector.restore(state, kept)
        self._cut = self._collector.cut()
        self._restored_step = self.ledger.last_step

    def keep_ledger(self, path: Path) -> None:
        self._draws.keep_journal(path, max_staleness=self._config.rollout.max_staleness)

    def close(self) -> None:
        """End engines' clients, reward workers and the thread. May be called twice."""
        if self.loop.is_closed():
            return
        try:
            self._call(self._stop(), CLOSE_S, "closing the rollout service")
        except DeadlineExceeded as error:
            logger.warning("%s", error)  # the daemon thread ends with the process
        finally:
            self.thread.close()
            self._draws.close()

    async def _stop(self) -> None:
        await self._collector.halt()
        await self.fleet.close()
        closing = {
            asyncio.ensure_future(engine.close()): f"engine {engine.name}"
            for engine in self.fleet.engines
        }
        closing[asyncio.ensure_future(self._scorer.close())] = "the reward"
        done, _ = await asyncio.wait(closing, timeout=CLOSE_S)
        for task, party in closing.items():
            if task not in done:
                logger.warning("%s did not close within %g s", party, CLOSE_S)
            elif task.exception() is not None:
                logger.warning("%s failed to close: %s", party, task.exception())
