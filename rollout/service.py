"""The rollout service: prompts -> workflow -> engines -> reward -> filters -> samples of a step.

The trainer's rank 0 drives it synchronously. Everything asynchronous runs in one thread, whose loop
also carries the engine clients.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlcore.config import Config
from rlcore.config.derived import max_request_s, placement_timeout_s, total_steps
from rlcore.config.evaluation_sets import EvaluationSet
from rlcore.data.batch import StepRollouts
from rlcore.data.loading import load_prompts, prompt_stream
from rlcore.data.prompts import PromptSet
from rlcore.data.sample import Sample
from rlcore.deadlines import AUDIT_S, CLOSE_ENGINES_S, GIVE_UP_S, REWARD_START_S
from rlcore.errors import ConfigError, DeadlineExceeded
from rlcore.interfaces import RolloutEngine
from rlcore.runs.directory import RunDirectory
from rlcore.runs.versions import Version
from rollout.accounting.prompt_queue import PromptQueue
from rollout.asyncio_utils import LoopThread, cancel, gather_or_cancel, within
from rollout.collection.buffer import BufferedGroup, PublishedVersions, StepGroups, decode
from rollout.collection.collector import Collector
from rollout.collection.evaluation import Evaluator
from rollout.collection.filters import FilterChain
from rollout.collection.group_runner import training_runner
from rollout.engines.checks import check_vocabulary
from rollout.fleet.dispatcher import Dispatcher
from rollout.fleet.engine_list import EngineList, keep_shown
from rollout.fleet.fleet import Fleet
from rollout.fleet.publication import WeightPublication
from rollout.rewards.audit import RewardAudit
from rollout.rewards.labels import check_labels
from rollout.rewards.scorer import build_scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass
class PendingWork(Generic[T]):
    """Work of the rollout loop that the trainer waits for, over several calls if necessary.

    The work continues while the trainer publishes weights to an engine between calls.
    """

    what: str  # name in messages, such as "the rollouts of step 3"
    task: asyncio.Task[T]
    began: float = field(default_factory=time.perf_counter)


class RolloutService:
    """Implements `rlcore.interfaces.RolloutSource`.

    Construction checks; `start` starts engines and reward workers.

    Args:
        prompts: training prompts from `rlcore.data.loading.load_prompts`.
        greedy_baseline: give every prompt of a step one more response, at temperature 0, that only
            gives the `baseline_reward` of its samples: it is not trained on, is not counted in
            episodes, and no filter sees it.
        thread: the loop that runs the engines; default: one of its own.

    Raises:
        UserError: bad prompts, labels, rewards, filters or vocabulary sizes.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        engines: Sequence[RolloutEngine],
        prompts: PromptSet,
        *,
        greedy_baseline: bool = False,
        thread: LoopThread | None = None,
    ) -> None:
        if not engines:
            raise ConfigError("the rollout service needs at least one engine")
        self._config = config
        rollout = config.rollout
        engine = rollout.engine
        self.fleet = Fleet(
            engines,
            engine,
            placement_timeout_s=placement_timeout_s(config),
            listed=None if engine.urls_file is None else EngineList(config),
            check=self._check_length,
        )
        self.publication = WeightPublication(config, self.fleet)
        vocab_size = check_vocabulary(config.model.path, tokenizer)
        check_labels(config, prompts)
        self.prompts = prompts
        self._filters = FilterChain(rollout.filters, samples_per_prompt=rollout.samples_per_prompt)
        scorer_of = partial(build_scorer, max_new_tokens=rollout.sampling.max_new_tokens)
        self._scorer = scorer_of(config.reward)
        self._audit = RewardAudit(config.reward, prompts, tokenizer)
        self._queue = PromptQueue(self.prompts, prompt_stream(config, self.prompts))
        self.ledger = self._queue.ledger
        self._dispatcher = Dispatcher(
            self.fleet, engine, vocab_size=vocab_size, limit_s=max_request_s(config)
        )
        shared = (config, tokenizer, self._dispatcher, self._scorer)
        self._training = training_runner(*shared, greedy_baseline=greedy_baseline)
        self._evaluator = Evaluator(
            *shared, load_prompts=partial(_held_out, config, tokenizer), build_scorer=scorer_of
        )
        self._versions = PublishedVersions()
        self._collector = Collector(
            config,
            self._queue,
            self._training,
            self._filters,
            self._versions,
            steps=total_steps(config, len(self.prompts)),
            busy_seconds=lambda: self._dispatcher.busy_seconds,
        )
        self.fleet.router.on_room = self._collector.wake
        # the state after the newest step that the trainer has
        self._snapshot = self._collector.snapshot()
        # the last step handed over before `restore`
        self._restored_step = 0
        self._pending: PendingWork[Any] | None = None
        self._showing: Future[None] | None = None
        # counters at the last hand-over
        self._seen = self._so_far()
        self._seen_drafts = self._dispatcher.drafts
        self.thread = LoopThread("rollout") if thread is None else thread
        self.loop = self.thread.loop

    def start(self, *, again: bool = False) -> None:
        """Start engines and reward workers, and wait until they answer.

        Args:
            again: this service replaces a lost one; see `Fleet.start`.

        Raises:
            RunFailed: an engine or worker did not start; the service is closed then.
            ConfigError: a prompt does not fit into an engine.
        """
        run = self._config.run
        directory = RunDirectory(Path(run.dir) / run.name)
        if directory.logs.is_dir():
            shown = keep_shown(self.fleet.members, directory.engines_path)
            self._showing = asyncio.run_coroutine_threadsafe(shown, self.loop)
        limit = self.fleet.restart_timeout_s + REWARD_START_S + AUDIT_S
        rewards = self._scorer.start() if again else self._audit.start(self._scorer)
        starting = gather_or_cancel(rewards, self._evaluator.start(), self.fleet.start(again=again))
        try:
            self.thread.call(starting, limit, "starting the engines and rewards")
        except BaseException:
            self.close()
            raise

    def _check_length(self, engine: RolloutEngine) -> None:
        """Refuse prompts that leave no room for a response in a newly started engine."""
        if (total := getattr(engine, "max_total_tokens", None)) is None:
            return
        usual = self._config.rollout.sampling.max_new_tokens
        wanted = [("rollout.sampling", self.prompts, usual)]
        wanted += [
            (one.given.key, one.prompts, one.given.max_new_tokens or usual)
            for one in self._evaluator.sets
        ]
        for key, prompts, response in wanted:
            longest = int(prompts.lengths.max())
            if longest + response > total:
                raise ConfigError(
                    f"engine {engine.name} takes {total} tokens of prompt and response (its context"
                    f" and KV pool), and the longest prompt has {longest} in addition to"
                    f" {key}.max_new_tokens ({response}): set data.max_prompt_tokens to"
                    f" {total - response}, or give the engine more memory"
                )

    # --- training ---------------------------------------------------------------------------------

    def next_step(self, step: int) -> StepRollouts | None:
        """The samples of `step`: `prompts_per_step` groups that passed the filters, in draw order.

        None if an engine waits for weights; collection continues, and the next call waits for the
        same groups.

        Raises:
            DeadlineExceeded: `rollout.timeout_s` or `rollout.engine.request_timeout_s` passed;
                names what the call was waiting for.
            EmptyBatch: the filters leave too few groups.
            TooManyFailed: see `rollout.max_failed` and `reward.max_failed`.
            NoEngineLeft: no engine serves, and none can be restarted.
            RunFailed: an engine or workflow failed.

        With `max_staleness` 0 the draws of a failed step are requeued. Otherwise a failure since
        the last step is raised, and only its own draws are requeued.
        """
        found = self._wait_for(
            lambda: self._collector.collect(step),
            f"the rollouts of step {step}",
            f"step {step} has no rollouts",
            self._collector.describe_wait,
        )
        if found is None:
            return None
        self._queue.stream.check_results()
        done, seconds = found
        self._snapshot = done.snapshot
        metrics = {
            "time/generation": seconds,
            **done.metrics,
            **self._happened(),
            **self._drafted(),
            **self._dropped(done),
        }
        engines = self._dispatcher.engines_of(
            self._config.run.seed, [group.draw for group in done.groups]
        )
        unscored = done.unscored
        steps = self._versions.of_samples([*done.samples, *unscored])
        return StepRollouts(
            done.samples, metrics, done.epoch, done.snapshot.queue, engines, steps, unscored
        )

    def published(self, step: int, version: int, incarnation: int) -> None:
        """Record that weights of policy step `step` are in force as `version`.

        No-op if a later step was handed over before `restore`: a replacement service can receive
        this call late. Generation then begins with the next publication.
        """

        async def published() -> None:
            if step < self._restored_step:
                return
            self._versions.add(Version(version, step, incarnation))
            self._collector.published(step)

        self.thread.call(published(), CLOSE_ENGINES_S, f"the news of version {version}")

    def _wait_for(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        what: str,
        late: str,
        describe_wait: Callable[[], str],
    ) -> tuple[T, float] | None:
        """The result of `work` and its seconds; None if an engine waits for weights first.

        The first call starts the work; after None, the next call continues to wait for it.

        Args:
            late: what has not happened, for the deadline's message.
            describe_wait: names what the call was waiting for.
        """
        limit = self._config.rollout.timeout_s

        def message() -> str:
            return f"{late} after {limit:g} s (rollout.timeout_s): {describe_wait()}"

        async def go_on() -> PendingWork[T]:
            if self._pending is None:
                task = asyncio.ensure_future(within(limit, work(), message))
                self._pending = PendingWork(what, task)
            pending = self._pending
            stale = asyncio.ensure_future(self.fleet.wait_for_stale())
            try:
                await asyncio.wait({pending.task, stale}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stale.cancel()
            return pending

        try:
            pending = self.thread.call(go_on(), limit, what)
            if not pending.task.done():
                return None
            result = pending.task.result()
        except BaseException:
            self.abandon()
            raise
        self._pending = None
        return result, time.perf_counter() - pending.began

    def abandon(self) -> None:
        """Give up the pending step or evaluation, if any. Callable from any thread."""
        pending = self._pending
        self._pending = None
        if pending is not None and not pending.task.done():
            work = cancel(pending.task, seconds=GIVE_UP_S)
            self.thread.call(work, GIVE_UP_S, f"giving up {pending.what}")

    def _dropped(self, done: StepGroups) -> dict[str, float]:
        """Counts of draws that the step was not trained on, by reason."""
        counts = done.drop_counts
        named = {
            "requeued_prompts": counts.requeued,
            "failed_groups": counts.given_up,
            "scored_samples": counts.rewards.samples,
            "reward_errors": counts.rewards.errors,
            "reward_timeouts": counts.rewards.timeouts,
            "unscored_samples": len(counts.rewards.unscored),
            "excluded_prompts": self.prompts.num_excluded,
            **{f"dropped_{name}": counts.dropped[name] for name in self._filters.names},
        }
        return {f"rollout/{name}": float(count) for name, count in named.items()}

    def _happened(self) -> dict[str, float]:
        """Event counts since the last hand-over, and the number of serving engines."""
        before = self._seen
        self._seen = self._so_far()
        counts = {name: now - before[name] for name, now in self._seen.items()}
        counts["engines_serving"] = self.fleet.serving
        # a kind of failure has a metric only in the steps in which it occurs
        return {
            f"rollout/{name}": float(count)
            for name, count in counts.items()
            if count or not name.startswith("failed_tries_")
        }

    def _drafted(self) -> dict[str, float]:
        """How well draft models have done since the last hand-over; {} where none proposed."""
        before = self._seen_drafts
        now = self._seen_drafts = self._dispatcher.drafts
        verifications = now.verifications - before.verifications
        if not verifications:
            return {}
        accepted = now.accepted - before.accepted
        return {
            "rollout/draft_acceptance": accepted / (now.proposed - before.proposed),
            "rollout/tokens_per_verification": 1 + accepted / verifications,
        }

    def _so_far(self) -> Counter[str]:
        failed = self._training.attempts.failed
        return Counter(
            engine_restarts=self.fleet.restarts,
            retried_requests=self._dispatcher.retried,
            overdue_requests=self._dispatcher.overdue,
            resumed_responses=self._training.attempts.partial.resumed_responses,
            resumed_tokens=self._training.attempts.partial.resumed_tokens,
            failed_tries=failed.total(),
            **{f"failed_tries_{kind}": count for kind, count in failed.items()},
        )

    # --- evaluation -------------------------------------------------------------------------------

    def evaluate(
        self, sets: Sequence[str] | None = None
    ) -> tuple[dict[str, float], list[Sample]] | None:
        """Score sets of held-out prompts, by default all; ({}, []) if there are none.

        None if an engine waits for weights; the next call continues to wait, as in `next_step`.
        """
        if not self._evaluator.chosen(sets):
            return {}, []
        found = self._wait_for(
            lambda: self._evaluator.run(sets),
            "the evaluation",
            "the evaluation has not ended",
            self._evaluator.describe_wait,
        )
        return None if found is None else found[0]

    # --- state ------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """The state after the newest hand-over that the trainer knows.

        Another hand-over may follow while the trainer publishes weights to an engine.
        """
        return {**self._snapshot.encoded(), "held_out": self._evaluator.records()}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a snapshot; draws that were in flight at that time are drawn again.

        Raises:
            DataError: the prompts are not those of the snapshot.
        """
        state = self._queue.beginning() if state is None else state
        self._evaluator.warn_of_changes(state.get("held_out", {}))
        # decode in this thread, since a large buffer would block the loop
        groups = decode(state.get("ahead", {}).get("groups", ()))
        self.thread.call(
            self._restore(state, groups), CLOSE_ENGINES_S, "restoring the rollout service"
        )

    async def _restore(self, state: Mapping[str, Any], groups: Sequence[BufferedGroup]) -> None:
        await self._collector.halt()
        self._collector.restore(state, groups)
        self._snapshot = self._collector.snapshot()
        self._restored_step = self.ledger.last_step

    def keep_ledger(self, path: Path) -> None:
        """Append every draw's transitions to `path` from now on."""
        self._queue.keep_journal(path, max_staleness=self._config.rollout.max_staleness)

    def close(self) -> None:
        """Close the engine clients, the reward workers and the thread. May be called twice."""
        if self.loop.is_closed():
            return
        try:
            self.thread.call(self._stop(), CLOSE_ENGINES_S, "closing the rollout service")
        except DeadlineExceeded as error:
            # a thread that hangs ends with the process, since it is a daemon
            logger.warning("%s", error)
        finally:
            self.thread.close()
            self._queue.close()

    async def _stop(self) -> None:
        if self._showing is not None:
            self._showing.cancel()
        await self._collector.halt()
        await self.fleet.close()
        parties: dict[str, Any] = {f"engine {one.name}": one for one in self.fleet.engines}
        parties |= {
            "the publication of weights": self.publication,
            "the reward": self._scorer,
            "the reward of the evaluation": self._evaluator,
        }
        closing = {asyncio.ensure_future(one.close()): name for name, one in parties.items()}
        done, _ = await asyncio.wait(closing, timeout=CLOSE_ENGINES_S)
        for task, party in closing.items():
            if task not in done:
                logger.warning("%s did not close within %g s", party, CLOSE_ENGINES_S)
            elif task.exception() is not None:
                logger.warning("%s failed to close: %s", party, task.exception())


def _held_out(config: Config, tokenizer: PreTrainedTokenizerBase, of: EvaluationSet) -> PromptSet:
    """The tokenized prompts of an evaluation set.

    Raises:
        ConfigError, DataError: a bad row, or labels that a verifier cannot compare.
    """
    config = of.config(config)
    prompts = load_prompts(
        config,
        tokenizer,
        of.paths,
        key=f"{of.key}.paths",
        max_prompts=of.max_prompts,
        max_new_tokens=config.evaluation.max_new_tokens,
    )
    check_labels(config, prompts)
    return prompts
