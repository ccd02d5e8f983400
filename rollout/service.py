"""The rollout service: prompts -> workflow -> engines -> reward -> filters -> the samples of a step.

It is driven synchronously by the trainer's rank 0; everything asynchronous happens in one thread, whose loop also carries
the engine clients.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlcore.config import Config
from rlcore.data.prompts import PromptSet, PromptStream
from rlcore.data.sample import Sample
from rlcore.errors import ConfigError, DataError, DeadlineExceeded, EmptyBatch
from rlcore.protocols import RolloutEngine, StepRollouts
from rollout.deadlines import LoopThread, together
from rollout.dispatch import Dispatcher
from rollout.draws import Draws
from rollout.errand import Errand
from rollout.filters import FilterChain
from rollout.fleet import Fleet
from rollout.rewards.build import build_scorer
from rollout.rewards.pool import START_TIMEOUT_S as REWARD_START_TIMEOUT_S
from rollout.rewards.scorer import VERIFIERS, FailureCounts
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
        self.fleet = Fleet(engines, config.rollout.engine)
        vocab_size = check_vocabulary(config.model.path, tokenizer)
        self.prompts = self._load(config.data.paths, None)
        paths = config.evaluation.paths
        self._evaluation_prompts = self._load(paths, config.evaluation.max_prompts) if paths else None
        self._filters = FilterChain(config.rollout.filters, samples_per_prompt=config.rollout.samples_per_prompt)
        self._scorer = build_scorer(config.reward, vocab_size=vocab_size, device=config.rollout.engine.device)
        self._draws = Draws(PromptStream(
            len(self.prompts), seed=config.run.seed, shuffle=config.data.shuffle, fingerprint=self.prompts.fingerprint()
        ))
        self.ledger = self._draws.ledger
        self._dispatcher = Dispatcher(self.fleet, config.rollout.engine)
        runners = Runners(config, tokenizer, self._dispatcher, self._scorer)
        row_of = self._draws.stream.row
        self._training = runners.training(lambda draw: self.prompts[row_of(draw)], greedy_baseline=greedy_baseline)
        self._evaluation = runners.evaluation((self._evaluation_prompts or self.prompts).__getitem__)
        self._errand: Errand[Any] | None = None     # that goes on while the trainer brings an engine its weights
        self._before: dict[str, float] = {}         # the counters when it began
        self._seen = {"rollout/engine_restarts": 0.0, "rollout/retried_requests": 0.0}     # at the last hand-over
        self.thread = LoopThread("rollout")
        self.loop = self.thread.loop

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
        await together(self._scorer.start(), self.fleet.start())

    def _call(self, work: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        return self.thread.call(work, seconds=seconds, what=what)

    # --- training -------------------------------------------------------------------------------------------------

    def next_step(self, step: int) -> StepRollouts | None:
        """The samples of `step`: `prompts_per_step` groups that passed the filters, in the order of their draws.

        None when an engine waits for the weights; the groups are collected on, and the next call waits for the same ones.

        Raises:
            DeadlineExceeded: `rollout.timeout_s` or `rollout.engine.request_timeout_s`; names who was waited for.
            EmptyBatch: the filters leave too little.
            NoEngineLeft: none serves, and none can be started again.
            RunFailed: an engine or workflow failed.

        The draws of a step that failed are requeued.
        """

        def stuck() -> str:
            limit = self._config.rollout.timeout_s
            return f"step {step} has no rollouts after {limit:g} s (rollout.timeout_s): {self._training.stuck()}"

        try:
            found = self._visit(lambda: self._collect(step), stuck, self._training.failures, f"the rollouts of step {step}")
        except BaseException:
            self._draws.give_back_unsettled()
            raise
        if found is None:
            return None
        done, counts, seconds = found
        self._draws.hand_over([group.draw for group in done.kept], step)
        metrics = {
            "time/generation": seconds,
            **counts,
            **self._faults(),
            "rollout/requeued_prompts": float(done.requeued),
            "rollout/excluded_prompts": float(len(self.prompts.excluded)),
            **{f"rollout/dropped_{name}": float(done.dropped[name]) for name in self._filters.names},
        }
        samples = [sample for group in done.kept for sample in group.samples]
        engines = self._dispatcher.engines_of(self._config.run.seed, [group.draw for group in done.kept])
        return StepRollouts(samples, metrics, self._draws.stream.epoch, self.snapshot(), engines)

    def _visit(
        self, work: Callable[[], Coroutine[Any, Any, T]], stuck: Callable[[], str], failures: FailureCounts, what: str
    ) -> tuple[T, dict[str, float], float] | None:
        """The result of `work`, what was counted meanwhile, and its seconds; None when an engine waits for weights before.

        Begun by the first visit, and only awaited by those after it.
        """
        if self._errand is None:
            self._before = self._counters(failures)
            limit = self._config.rollout.timeout_s
            self._errand = Errand(self.thread, work(), limit_s=limit, what=what, stuck=stuck)
        errand, self._errand = self._errand, None
        if not errand.done_before(self.fleet.someone_waits):
            self._errand = errand
            return None
        counts = {name: now - self._before[name] for name, now in self._counters(failures).items()}
        return errand.result(), counts, errand.seconds

    def _counters(self, failures: FailureCounts) -> dict[str, float]:
        return {
            "time/engine": self._dispatcher.busy_s,
            "rollout/reward_errors": float(failures.errors),
            "rollout/reward_timeouts": float(failures.timeouts),
        }

    def _faults(self) -> dict[str, float]:
        """What engines did since the last hand-over, and how many there are."""
        before, self._seen = self._seen, {
            "rollout/engine_restarts": float(self.fleet.restarts), "rollout/retried_requests": float(self._dispatcher.retried),
        }
        return {
            **{name: now - before[name] for name, now in self._seen.items()},
            "rollout/engines_serving": float(self.fleet.serving),
        }

    async def _collect(self, step: int) -> _Step:
        """Draw waves of prompts until enough groups are kept; groups that are over go back to the stream."""
        done, wanted = _Step(), self._config.rollout.prompts_per_step
        while len(done.kept) < wanted:
            room = DRAWS_PER_GROUP * wanted - done.draws
            if room <= 0:
                raise EmptyBatch(self._too_little(step, done, wanted))
            count = min(room, math.ceil((wanted - len(done.kept)) * self._config.rollout.oversample))
            draws = self._draws.take(count)
            done.draws += count
            for group in await self._training.run(draws):
                self._sort_out(group, done, wanted)
        return done

    def _sort_out(self, group: Group, done: _Step, wanted: int) -> None:
        self.ledger.finish(group.draw)
        refused_by = None if group.aborted else self._filters.refusal(group.samples)
        if refused_by is not None:
            self.ledger.drop(group.draw, refused_by)
            done.dropped[refused_by] += 1
        elif group.aborted or len(done.kept) == wanted:
            self._draws.give_back(group.draw)
            done.requeued += 1
        else:
            done.kept.append(group)

    def _too_little(self, step: int, done: _Step, wanted: int) -> str:
        reasons = [f"{name} dropped {count}" for name, count in done.dropped.most_common()]
        if done.requeued:
            reasons.append(f"{done.requeued} were aborted by an engine")
        return (
            f"step {step} has {len(done.kept)} of {wanted} groups after {done.draws} draws: {', '.join(reasons)}; "
            "use other prompts, a higher temperature, more rollout.samples_per_prompt or fewer rollout.filters"
        )

    # --- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self) -> tuple[dict[str, float], list[Sample]] | None:
        """Score every evaluation prompt; ({}, []) when there are none. None when an engine waits for the weights.

        The random numbers (for a temperature above 0) depend on the prompt alone: the same in each evaluation.
        """
        if self._evaluation_prompts is None:
            return {}, []
        draws = range(len(self._evaluation_prompts))

        def stuck() -> str:
            limit = self._config.rollout.timeout_s
            return f"the evaluation has not ended after {limit:g} s (rollout.timeout_s): {self._evaluation.stuck()}"

        found = self._visit(lambda: self._evaluation.run(draws), stuck, self._evaluation.failures, "the evaluation")
        if found is None:
            return None
        groups, counts, _ = found
        samples = [sample for group in groups for sample in group.samples]
        metrics = evaluation_metrics(samples)
        metrics["eval/reward_errors"] = counts["rollout/reward_errors"]
        metrics["eval/reward_timeouts"] = counts["rollout/reward_timeouts"]
        return metrics, samples

    # --- state ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        return self._draws.snapshot()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot; draws that were unsettled when it was taken are drawn again.

        Raises:
            DataError: the prompts are not those of the snapshot.
        """
        self._draws.restore(state)
        self._draws.give_back_unsettled()

    def keep_ledger(self, path: Path) -> None:
        self._draws.keep_journal(path)

    def close(self) -> None:
        """End engines' clients, reward workers and the thread. May be called twice."""
        if self.loop.is_closed():
            return
        try:
            self._call(self._stop(), CLOSE_S, "closing the rollout service")
        except DeadlineExceeded as error:
            logger.warning("%s", error)         # the daemon thread ends with the process
        finally:
            self.thread.close()
            self._draws.close()

    async def _stop(self) -> None:
        await self.fleet.close()
        closing = {asyncio.ensure_future(engine.close()): f"engine {engine.name}" for engine in self.fleet.engines}
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
