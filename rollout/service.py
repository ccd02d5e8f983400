"""The rollout service: prompts -> workflow -> engines -> reward -> filters -> the samples of a step.

It is driven synchronously by the trainer's rank 0; everything asynchronous happens in one thread, whose loop also carries
the engine clients.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rlcore.config import Config
from rlcore.data.prompts import PromptSet, PromptStream
from rlcore.data.sample import Sample
from rlcore.errors import ConfigError, DataError, DeadlineExceeded, EmptyBatch
from rlcore.protocols import RolloutEngine, StepRollouts
from rollout.deadlines import LoopThread, together, within
from rollout.dispatch import Dispatcher
from rollout.filters import FilterChain
from rollout.ledger import Ledger
from rollout.rewards.build import build_scorer
from rollout.rewards.pool import START_TIMEOUT_S as REWARD_START_TIMEOUT_S
from rollout.rewards.scorer import VERIFIERS
from rollout.runners import Runners
from rollout.vocabulary import check_vocabulary
from rollout.waves import Group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
logger = logging.getLogger(__name__)

CLOSE_S = 30.0
DRAWS_PER_GROUP = 16                            # a step gives up after so many draws for each group it needs


@dataclass
class _Step:
    """What happened while the groups of one step were collected."""

    kept: list[Group] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    requeued: int = 0
    draws: int = 0


class RolloutService:
    """Implements `rlcore.protocols.RolloutSource`. Construction reads and checks; `start` starts engines and reward workers.

    Args:
        greedy_baseline: every prompt of a step gets one more response, at temperature 0 and for nothing but the
            `baseline_reward` of its samples: it is not among them, in no count of episodes, and no filter sees it.

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
        if config.rollout.max_staleness != 0:
            raise ConfigError(f"rollout.max_staleness: {config.rollout.max_staleness}: only 0 (on-policy) is supported so far")
        if not engines:
            raise ConfigError("the rollout service needs at least one engine")
        self._config, self._tokenizer = config, tokenizer
        self.engines = list(engines)
        vocab_size = check_vocabulary(config.model.path, tokenizer)
        self.prompts = self._load(config.data.paths, None)
        paths = config.evaluation.paths
        self._evaluation_prompts = self._load(paths, config.evaluation.max_prompts) if paths else None
        self._filters = FilterChain(config.rollout.filters, samples_per_prompt=config.rollout.samples_per_prompt)
        self._scorer = build_scorer(config.reward, vocab_size=vocab_size, device=config.rollout.engine.device)
        self._stream = PromptStream(
            len(self.prompts), seed=config.run.seed, shuffle=config.data.shuffle, fingerprint=self.prompts.fingerprint()
        )
        self.ledger = Ledger()
        self._dispatcher = Dispatcher(
            self.engines, timeout_s=config.rollout.engine.request_timeout_s, max_batch=config.rollout.engine.max_batch
        )
        runners = Runners(config, tokenizer, self._dispatcher, self._scorer)
        self._training = runners.training(lambda draw: self.prompts[self._stream.row(draw)], greedy_baseline=greedy_baseline)
        self._evaluation = runners.evaluation((self._evaluation_prompts or self.prompts).__getitem__)
        self._thread = LoopThread("rollout")
        self.loop = self._thread.loop

    def start(self) -> None:
        """Engines and reward workers answer when this returns.

        Raises:
            RunFailed: one of them did not start; the service is closed then.
        """
        limit = self._config.rollout.engine.start_timeout_s + REWARD_START_TIMEOUT_S
        try:
            self._call(self._start(), limit, "starting the engines and rewards")
        except BaseException:
            self.close()
            raise

    # --- construction ---------------------------------------------------------------------------------------------

    def _load(self, paths: Sequence[str], max_prompts: int | None) -> PromptSet:
        data = self._config.data
        prompts = PromptSet.load(
            paths,
            self._tokenizer,
            prompt_key=data.prompt_key,
            label_key=data.label_key,
            max_prompt_tokens=data.max_prompt_tokens,
            max_prompts=max_prompts,
        )
        self._check_labels(prompts)
        return prompts

    def _check_labels(self, prompts: PromptSet) -> None:
        verifiers = [n for n, part in self._config.reward.parts.items() if part.function in VERIFIERS]
        if verifiers and self._config.data.label_key is None:
            raise ConfigError(f"reward.parts.{verifiers[0]} compares with a label, but data.label_key is null")
        for example in prompts.examples if verifiers else ():
            if isinstance(example.label, bool) or not isinstance(example.label, str | int | float):
                raise DataError(
                    f"{example.where}: the label must be text or a number for reward.parts.{verifiers[0]}, "
                    f"got {type(example.label).__name__}"
                )

    async def _start(self) -> None:
        await together(self._scorer.start(), *(self._start_engine(engine) for engine in self.engines))

    async def _start_engine(self, engine: RolloutEngine) -> None:
        seconds = self._config.rollout.engine.start_timeout_s
        await within(
            seconds,
            engine.start(),
            lambda: f"engine {engine.name} was not ready after {seconds:g} s (rollout.engine.start_timeout_s)",
        )

    def _call(self, work: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        return self._thread.call(work, seconds=seconds, what=what)

    # --- training -------------------------------------------------------------------------------------------------

    def next_step(self, step: int) -> StepRollouts:
        """The samples of `step`: `prompts_per_step` groups that passed the filters, in the order of their draws.

        Raises:
            DeadlineExceeded: `rollout.timeout_s` or `rollout.engine.request_timeout_s`; names who was waited for.
            EmptyBatch: the filters leave too little.
            RunFailed: an engine or workflow failed.

        The draws of a step that failed are requeued.
        """
        limit = self._config.rollout.timeout_s
        failures = self._training.failures
        errors, timeouts, busy, began = failures.errors, failures.timeouts, self._dispatcher.busy_s, time.perf_counter()
        done = _Step()

        def stuck() -> str:
            return f"step {step} has no rollouts after {limit:g} s (rollout.timeout_s): {self._training.stuck()}"

        try:
            self._call(within(limit, self._collect(step, done), stuck), limit, f"the rollouts of step {step}")
        except BaseException:
            for draw in self.ledger.unsettled():
                self._requeue(draw)
            raise
        for group in done.kept:
            self.ledger.consume(group.draw, step)
        metrics = {
            "time/generation": time.perf_counter() - began,
            "time/engine": self._dispatcher.busy_s - busy,
            "rollout/reward_errors": float(failures.errors - errors),
            "rollout/reward_timeouts": float(failures.timeouts - timeouts),
            "rollout/requeued_prompts": float(done.requeued),
            "rollout/excluded_prompts": float(len(self.prompts.excluded)),
            **{f"rollout/dropped_{name}": float(done.dropped[name]) for name in self._filters.names},
        }
        samples = [sample for group in done.kept for sample in group.samples]
        return StepRollouts(samples, metrics, self._stream.epoch, self.snapshot())

    async def _collect(self, step: int, done: _Step) -> None:
        """Draw waves of prompts until enough groups are kept; groups that are over go back to the stream."""
        wanted = self._config.rollout.prompts_per_step
        while len(done.kept) < wanted:
            room = DRAWS_PER_GROUP * wanted - done.draws
            if room <= 0:
                raise EmptyBatch(self._too_little(step, done, wanted))
            count = min(room, math.ceil((wanted - len(done.kept)) * self._config.rollout.oversample))
            draws = self._stream.take(count)
            self.ledger.draw(draws)
            done.draws += count
            for group in await self._training.run(draws):
                self._sort_out(group, done, wanted)

    def _sort_out(self, group: Group, done: _Step, wanted: int) -> None:
        self.ledger.finish(group.draw)
        refused_by = None if group.aborted else self._filters.refusal(group.samples)
        if refused_by is not None:
            self.ledger.drop(group.draw, refused_by)
            done.dropped[refused_by] += 1
        elif group.aborted or len(done.kept) == wanted:
            self._requeue(group.draw)
            done.requeued += 1
        else:
            done.kept.append(group)

    def _requeue(self, draw: int) -> None:
        self.ledger.requeue(draw)
        self._stream.requeue(draw)

    def _too_little(self, step: int, done: _Step, wanted: int) -> str:
        reasons = [f"{name} dropped {count}" for name, count in done.dropped.most_common()]
        if done.requeued:
            reasons.append(f"{done.requeued} were aborted by an engine")
        return (
            f"step {step} has {len(done.kept)} of {wanted} groups after {done.draws} draws: {', '.join(reasons)}; "
            "use other prompts, a higher temperature, more rollout.samples_per_prompt or fewer rollout.filters"
        )

    # --- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self) -> tuple[dict[str, float], list[Sample]]:
        """Score every evaluation prompt; ({}, []) when there are none.

        The random numbers (for a temperature above 0) depend on the prompt alone: the same in each evaluation.
        """
        if self._evaluation_prompts is None:
            return {}, []
        limit, failures = self._config.rollout.timeout_s, self._evaluation.failures
        errors, timeouts = failures.errors, failures.timeouts

        def stuck() -> str:
            return f"the evaluation has not ended after {limit:g} s (rollout.timeout_s): {self._evaluation.stuck()}"

        wave = self._evaluation.run(range(len(self._evaluation_prompts)))
        groups = self._call(within(limit, wave, stuck), limit, "the evaluation")
        samples = [sample for group in groups for sample in group.samples]
        metrics = evaluation_metrics(samples)
        metrics["eval/reward_errors"] = float(failures.errors - errors)
        metrics["eval/reward_timeouts"] = float(failures.timeouts - timeouts)
        return metrics, samples

    # --- state ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        return {"stream": self._stream.snapshot(), "ledger": self.ledger.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot; draws that were unsettled when it was taken are drawn again.

        Raises:
            DataError: the prompts are not those of the snapshot.
        """
        self._stream.restore(state["stream"])
        self.ledger.restore(state["ledger"])
        for draw in self.ledger.unsettled():
            self._requeue(draw)

    def close(self) -> None:
        """End engines' clients, reward workers and the thread. May be called twice."""
        if self.loop.is_closed():
            return
        try:
            self._call(self._stop(), CLOSE_S, "closing the rollout service")
        except DeadlineExceeded as error:
            logger.warning("%s", error)         # the daemon thread ends with the process
        finally:
            self._thread.close()

    async def _stop(self) -> None:
        closing = {asyncio.ensure_future(engine.close()): f"engine {engine.name}" for engine in self.engines}
        closing[asyncio.ensure_future(self._scorer.close())] = "the reward"
        done, _ = await asyncio.wait(closing, timeout=CLOSE_S)
        for task, party in closing.items():
            if task not in done:
                logger.warning("%s did not close within %g s", party, CLOSE_S)
            elif task.exception() is not None:
                logger.warning("%s failed to close: %s", party, task.exception())


def evaluation_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over samples; `eval/accuracy` is the share that a verifier accepts, or else of rewards above 0."""
    n = len(samples)
    return {
        "eval/score": sum(s.reward for s in samples) / n,
        "eval/accuracy": sum(bool(s.metadata.get("correct", s.reward > 0)) for s in samples) / n,
        "eval/sequence_lengths": sum(s.num_trainable for s in samples) / n,
        "eval/stop_token_rate": sum(s.finish_reason == "stop" for s in samples) / n,
    }
