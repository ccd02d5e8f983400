"""Runs groups from their prompts through the workflow to the reward."""

from __future__ import annotations

import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlcore.algorithms import estimator_plugin
from rlcore.config import Config
from rlcore.config.derived import recorded_fields
from rlcore.config.evaluation_sets import EvaluationSet
from rlcore.data.generation import Generate, SamplingParams
from rlcore.data.loading import context_of
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rlcore.data.sample_checks import check_sample
from rlcore.data.tokenizer import decode, stop_token_ids
from rlcore.errors import RolloutFailed
from rlcore.timeline.recorder import GROUP, group_key
from rollout.asyncio_utils import gather_or_cancel
from rollout.collection.attempts import Aborted, Attempts, GivenUp, Make, PartialRollouts, Stage
from rollout.engines.checks import folder_vocab_size
from rollout.engines.factories import kind_of
from rollout.failures import Failure
from rollout.fleet.dispatcher import Dispatcher, LockstepBatcher
from rollout.rewards.scorer import FailureCounts, Scorer
from rollout.workflows.context import NO_LIMIT, WorkflowContext
from rollout.workflows.registry import build_workflow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EVALUATION_SEED = 0x6576616C  # keeps evaluation's random numbers apart from training's
# keeps the addresses of greedy requests apart from those of the same draw's samples
BASELINE_SEED = 0x67726565


@dataclass
class Group:
    """The scored samples of one draw, with the greedy samples that only give their baseline.

    Attributes:
        unscored: further samples, whose rewards failed (`reward.on_error: drop`). They are not
            trained on, and filters do not see them.
        rewards: statistics of the rewards of all these samples. In training, a group with too
            few scored rollouts has no samples.
        failures: failed rollouts. In training the first one removes all samples: a partial group
            is never trained on. In evaluation the samples of the other rollouts remain.
        cut: an engine aborted a response, so the draw gave no samples.
    """

    draw: int
    samples: list[Sample]
    greedy: list[Sample] = field(default_factory=list)
    unscored: list[Sample] = field(default_factory=list)
    rewards: FailureCounts = field(default_factory=FailureCounts)
    failures: list[Failure] = field(default_factory=list)
    cut: bool = False

    @property
    def aborted(self) -> bool:
        """Whether an engine aborted a response, so that the draw must be repeated."""
        return self.cut or any(
            sample.finish_reason == "abort" for sample in (*self.samples, *self.greedy)
        )


@dataclass(eq=False)
class _Call:
    """One call of a workflow, which makes a rollout of a draw or its whole group."""

    draw: int
    prompt: Prompt
    greedy: bool
    workflow: object
    make: Make
    generate: Generate
    stage: Stage = "start"


class GroupRunner:
    """Runs the configured workflow over draws.

    For an engine whose results depend on its batches, the requests of all draws are submitted
    together, in the order of the draws.

    Args:
        context: constructor argument of the workflow.
        greedy: the context of the same workflow for one answer at temperature 0. Every draw runs
            it too: the mean reward of its result becomes the `baseline_reward` of the draw's
            samples.
        recorded: fields that every sample but the greedy ones must have, with the key that
            requires them.
        part_of_a_group: keep the other rollouts of a group, however few, if one fails or has no
            score, as in evaluation.
        min_scored: scored rollouts that a group needs otherwise.
    """

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        scorer: Scorer,
        context: WorkflowContext,
        *,
        greedy: WorkflowContext | None = None,
        recorded: Mapping[str, str] = MappingProxyType({}),
        part_of_a_group: bool = False,
        min_scored: int = 1,
    ) -> None:
        self.workflow_name = config.rollout.workflow.name
        self.workflow = build_workflow(context)
        self._greedy = None if greedy is None else build_workflow(greedy)
        self._seed = context.seed
        # the calls of each draw: (workflow, whether greedy, rollout; None: the whole group)
        self._parts: list[tuple[Any, bool, int | None]] = [
            (workflow, of is greedy, rollout)
            for workflow, of in ((self.workflow, context), (self._greedy, greedy))
            if of is not None
            # rollouts run separately, so each waits only for itself
            for rollout in (
                range(of.samples_per_prompt)
                if callable(getattr(workflow, "rollout", None))
                else (None,)
            )
        ]
        self.dispatcher = dispatcher
        self.scorer = scorer
        self.tokenizer = context.tokenizer
        self.attempts = Attempts(config.rollout.workflow, PartialRollouts(context.tokenizer))
        self.part_of_a_group = part_of_a_group
        self._min_scored = min_scored
        self.batched = kind_of(config.rollout.engine.kind).batches
        self.recorded = recorded
        self._vocab_size = folder_vocab_size(config.model.path)
        # calls that have not ended, in the order of their draws
        self._unfinished: dict[_Call, None] = {}
        # how many of them are at their start; counted, since it is read at every turn
        self._starting = 0

    async def run(self, prompts: Mapping[int, Prompt]) -> list[Group]:
        """The groups of `prompts`, given by draw, in their order, failed ones included.

        Raises:
            RunFailed: an engine or the reward failed; names it. All groups are given up then.
            UserError: the workflow reports a wrong configuration.
        """
        batcher = LockstepBatcher(self.dispatcher.batch) if self.batched else None
        calls: dict[int, list[_Call]] = {draw: [] for draw in prompts}
        for draw, prompt in prompts.items():
            for workflow, greedy, rollout in self._parts:
                if rollout is None:
                    make: Make = partial(workflow, prompt, draw)
                else:
                    make = partial(workflow.rollout, prompt, draw, rollout)
                call = _Call(draw, prompt, greedy, workflow, make, self.dispatcher.one)
                if batcher:
                    call.generate = batcher.enter(call)
                calls[draw].append(call)
                self._unfinished[call] = None
                self._starting += 1
        try:
            return await gather_or_cancel(*(self._group(own, batcher) for own in calls.values()))
        finally:
            self._leave([call for own in calls.values() for call in own], None)
            if batcher:
                await batcher.close()

    def _enter(self, call: _Call, stage: Stage) -> None:
        self._starting -= call.stage == "start"
        call.stage = stage

    def _leave(self, calls: Sequence[_Call], batcher: LockstepBatcher | None) -> None:
        """Forget calls. May be called twice."""
        for call in calls:
            self._enter(call, "done")
            self._unfinished.pop(call, None)
            # only when all have ended, so that no batch holds a part of a failed group
            if batcher:
                batcher.leave(call)

    async def _group(self, calls: Sequence[_Call], batcher: LockstepBatcher | None) -> Group:
        """The scored group of one draw, or an empty group with the reason."""
        draw = calls[0].draw
        # inherited by the tasks that this one starts
        GROUP.set(group_key(self._seed, draw))
        group = Group(draw, [])
        work = [self._samples(call, batcher) for call in calls]
        try:
            # a task costs time, so a single workflow runs in this one
            made = await gather_or_cancel(*work) if len(work) > 1 else [await work[0]]
            for call, found in zip(calls, made, strict=True):
                if isinstance(found, Failure):
                    group.failures.append(found)
                else:
                    (group.greedy if call.greedy else group.samples).extend(found)
            if group.samples:
                await self._score(group)
            return group
        except Aborted:
            return Group(draw, [], cut=True)
        except GivenUp as given_up:
            return Group(draw, [], failures=[given_up.failure])
        finally:
            self._leave(calls, batcher)

    async def _samples(
        self, call: _Call, batcher: LockstepBatcher | None
    ) -> list[Sample] | Failure:
        """The unscored samples that one call makes, with their texts."""
        samples: list[Sample] | Failure
        try:
            samples = await self.attempts.run(
                call.make,
                call.generate,
                partial(self._checked, call),
                where=f"{call.prompt.prompt_id} (draw {call.draw})",
                of=call.workflow,
                enter=partial(self._enter, call),
                withdraw=partial(batcher.withdraw, call) if batcher else lambda: None,
            )
        except GivenUp as given_up:
            if not self.part_of_a_group:
                raise
            samples = given_up.failure
        if batcher:
            batcher.leave(call)
        if isinstance(samples, list):
            bare = [s for s in samples if not s.response_text and not s.turn_spans]
            texts = decode(self.tokenizer, [one.tokens[one.loss_mask == 1] for one in bare])
            for sample, text in zip(bare, texts, strict=True):
                sample.response_text = text
        self._enter(call, "reward")
        return samples

    async def _score(self, group: Group) -> None:
        """Reward the samples of a group, by one call of the scorer.

        A rollout without a score loses all its samples. A group with too few scored rollouts, or
        without a required baseline, loses all samples.
        """
        for samples in (group.samples, group.greedy):
            # number the samples of a draw if a rollout made several
            if len({sample.index for sample in samples}) < len(samples):
                for place, sample in enumerate(samples):
                    sample.index = place
        group.rewards = await self.scorer.score(group.samples, group.greedy)
        lost = {sample.rollout_id for sample in group.samples if not sample.is_scored}
        scored = [sample for sample in group.samples if sample.rollout_id not in lost]
        baselines = [sample.reward for sample in group.greedy if sample.is_scored]
        # only if rollouts were lost: a workflow may make fewer rollouts on purpose
        few = lost and len({sample.rollout_id for sample in scored}) < self._min_scored
        if not self.part_of_a_group and (few or (group.greedy and not baselines)):
            scored = []
        for sample in scored if baselines else ():
            sample.baseline_reward = sum(baselines) / len(baselines)
        kept = {id(sample) for sample in scored}
        group.unscored = [sample for sample in group.samples if id(sample) not in kept]
        group.samples = scored

    def _checked(self, call: _Call, samples: object, versions: Container[int]) -> list[Sample]:
        """The validated samples of a workflow, made of tokens of these `versions` alone.

        Raises RolloutFailed for any other result.
        """
        if (
            not isinstance(samples, list)
            or not samples
            or not all(isinstance(s, Sample) for s in samples)
        ):
            raise RolloutFailed(
                "result",
                f"it returned {type(samples).__name__}, expected a list of at least one Sample",
            )
        draw = call.draw
        try:
            if len({id(sample) for sample in samples}) < len(samples):
                raise ValueError("it returned one sample twice, expected each once")
            for sample in samples:
                check_sample(sample, vocab_size=self._vocab_size)
                if not sample.draw == sample.group_id == draw:
                    raise ValueError(
                        f"a sample of draw {sample.draw} and group {sample.group_id}, expected"
                        f" {draw} for both, the number passed to the workflow"
                    )
                for span in sample.versions:
                    if span.version not in versions:
                        raise ValueError(
                            f"tokens of policy version {span.version}, expected versions of its"
                            " completions"
                        )
                for name, key in ({} if call.greedy else self.recorded).items():
                    if getattr(sample, name) is None:
                        raise ValueError(
                            f"{key} is on, but a sample has no {name}: join its completions' own"
                        )
        except (ValueError, TypeError, AttributeError) as error:
            raise RolloutFailed("result", str(error)) from error
        return samples

    def room(self, samples: int) -> int:
        """Number of groups, each of `samples`, that engines would begin at once.

        If engines batch call by call: as many as one call takes, once no batch is starting.
        """
        fleet = self.dispatcher.fleet
        engine = self.dispatcher.config
        if not self.batched:
            # a group with more calls than slots begins when all slots are free
            calls = min(len(self._parts), fleet.serving * engine.max_in_flight)
            # calls at their start will request a generation soon
            return (self.dispatcher.free_calls - self._starting) // calls if calls else 0
        free = 0 if self._starting or fleet.busy else fleet.serving * engine.max_batch
        return max(1, free // (samples + (self._greedy is not None))) if free else 0

    def describe_wait(self, of: Container[int] | None = None) -> str:
        """Name what the draws wait for, for error messages. `of`: only these draws."""
        gate = "the gate (other workflows have not asked for generation)"
        workflow = f"workflow {self.workflow_name}"
        parties = {
            "start": workflow,
            "workflow": workflow,
            "generation": self.dispatcher.fleet.describe_wait() or gate,
            "reward": "the reward",
        }
        # by party: the id of the prompt of each draw
        waiting: dict[str, dict[int, str]] = {party: {} for party in parties.values()}
        for call in self._unfinished:
            if of is None or call.draw in of:
                waiting[parties[call.stage]][call.draw] = call.prompt.prompt_id
        parts = [
            f"{len(ids)} of the prompts wait for {party}, the first is {ids[min(ids)]}"
            for party, ids in waiting.items()
            if ids
        ]
        return "; ".join(parts) or "no prompt is unfinished"


def training_runner(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    dispatcher: Dispatcher,
    scorer: Scorer,
    *,
    greedy_baseline: bool,
) -> GroupRunner:
    """The runner of training groups."""
    rollout = config.rollout
    greedy = _context(config, tokenizer, dispatcher, config.run.seed + BASELINE_SEED, 1)
    sampling = replace(
        greedy.sampling,
        temperature=rollout.sampling.temperature,
        top_p=rollout.sampling.top_p,
        top_k=rollout.sampling.top_k,
        sampling_mask=config.policy.logprobs.keep_sets,
        routed_experts=config.policy.routing_replay == "engine",
    )
    samples = rollout.samples_per_prompt
    name = config.algorithm.estimator.name
    # an estimator at an import path may compare groups: only registered ones declare it
    compares = ":" in name or estimator_plugin(name).compares_group
    return GroupRunner(
        config,
        dispatcher,
        scorer,
        replace(greedy, sampling=sampling, samples_per_prompt=samples, seed=config.run.seed),
        greedy=greedy if greedy_baseline else None,
        recorded=recorded_fields(config),
        min_scored=2 if compares and samples > 1 else 1,
    )


def evaluation_runner(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    dispatcher: Dispatcher,
    scorer: Scorer,
    given: EvaluationSet,
) -> GroupRunner:
    """The runner of a set of held-out prompts."""
    config = given.config(config)
    # derived from the name, so that the samples of a set are independent of other sets
    seed = config.run.seed + EVALUATION_SEED + zlib.crc32(given.name.encode())
    context = _context(config, tokenizer, dispatcher, seed, given.samples_per_prompt)
    sampling = replace(
        context.sampling,
        max_new_tokens=given.max_new_tokens or context.sampling.max_new_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
    )
    context = replace(context, sampling=sampling, policy=given.policy)
    return GroupRunner(config, dispatcher, scorer, context, part_of_a_group=True)


def _context(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    dispatcher: Dispatcher,
    seed: int,
    samples_per_prompt: int,
) -> WorkflowContext:
    """The context of a workflow, with sampling at temperature 0."""
    given = config.rollout.sampling
    limit = context_of(config)
    reserve = kind_of(config.rollout.engine.kind).answer_reserve

    def served() -> int | None:
        tokens = dispatcher.fleet.max_total_tokens
        return None if tokens is None else tokens - reserve

    return WorkflowContext(
        SamplingParams(
            max_new_tokens=given.max_new_tokens,
            temperature=0.0,
            stop_token_ids=stop_token_ids(tokenizer, given.stop_token_ids),
            stop=tuple(given.stop),
        ),
        samples_per_prompt,
        seed,
        tokenizer,
        settings=config.rollout.workflow,
        context=NO_LIMIT if limit is None else limit[0] - reserve,
        served=served,
        chat_kwargs=config.data.chat_template_kwargs,
        tool_parser=config.rollout.tool_parser,
        policies=tuple(config.rollout.policies),
    )
