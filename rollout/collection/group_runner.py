"""A wave: prompts that are worked on gather_or_cancel, from workflow to reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlcore.data.generation import Completion, Generate, GenerateRequest
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rlcore.data.tokenizer import decode
from rlcore.errors import RlcoreError, RunFailed
from rlcore.interfaces import Workflow
from rollout.asyncio_utils import asked_to_end, gather_or_cancel
from rollout.collection.lockstep_batcher import LockstepBatcher
from rollout.collection.partial import PartialRollouts
from rollout.engines.registry import kind_of
from rollout.fleet.dispatcher import Dispatcher
from rollout.rewards.scorer import FailureCounts, Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
from dataclasses import replace
from typing import TYPE_CHECKING

from rlcore.config import Config
from rlcore.config.derived import recorded_fields
from rlcore.data.generation import SamplingParams
from rlcore.data.tokenizer import stop_token_ids
from rollout.workflows import WorkflowContext, build_workflow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# one workflow of a wave: its draw, and whether it makes the greedy baseline
Member = tuple[int, bool]


@dataclass
class Group:
    """The scored samples of one draw, and the greedy ones that are only their baseline."""

    draw: int
    samples: list[Sample]
    greedy: list[Sample] = field(default_factory=list)

    @property
    def aborted(self) -> bool:
        return any(sample.finish_reason == "abort" for sample in (*self.samples, *self.greedy))


@dataclass
class GroupRunner:
    """Runs one workflow over draws. With `batched`, engines get the whole wave at once, in the
    order of the draws.

    With `greedy`, the same workflow built to answer once at temperature 0, every draw runs it too:
        the mean reward of what
    it returns becomes the `baseline_reward` of the draw's samples.
    """

    workflow: Workflow
    workflow_name: str
    prompt_of: Callable[[int], Prompt]
    dispatcher: Dispatcher
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    partial: PartialRollouts
    batched: bool
    greedy: Workflow | None = None
    # Fields that every sample but the greedy ones must have, with the key that asks for them.
    recorded: Mapping[str, str] = field(default_factory=dict)
    failures: FailureCounts = field(default_factory=FailureCounts)  # of all waves so far
    # of each workflow whose draw is unfinished
    _stage: dict[Member, str] = field(default_factory=dict)

    async def run(self, draws: Sequence[int]) -> list[Group]:
        """The groups of `draws`, in that order. If one fails, all are given up.

        Raises:
            RunFailed: an engine or the workflow failed; names it, and the prompt.
        """
        kinds = (False,) if self.greedy is None else (False, True)
        members = [(draw, greedy) for draw in draws for greedy in kinds]
        self._stage |= dict.fromkeys(members, "start")
        gate = LockstepBatcher(self.dispatcher.batch) if self.batched else None
        generators = {
            member: gate.enter(member) if gate else self.dispatcher.one for member in members
        }

        async def group(draw: int) -> Group:
            work = [self._samples((draw, kind), generators[draw, kind], gate) for kind in kinds]
            # a task apiece is not for nothing
            made = await gather_or_cancel(*work) if len(work) > 1 else [await work[0]]
            return await self._scored(Group(draw, *made))

        try:
            return await gather_or_cancel(*(group(draw) for draw in draws))
        finally:
            for member in members:
                self._stage.pop(member, None)
            if gate:
                await gate.close()

    async def _samples(
        self, member: Member, generate: Generate, gate: LockstepBatcher | None
    ) -> list[Sample]:
        """What one workflow makes of its prompt, unscored."""
        draw, greedy = member
        prompt = self.prompt_of(draw)
        workflow = self.greedy if greedy and self.greedy else self.workflow
        try:
            samples = await workflow(prompt, draw, self._staged(member, generate))
        except RlcoreError:
            raise
        # unnoticed, its draw would be started again and again
        except asyncio.CancelledError as error:
            if asked_to_end(asyncio.current_task()):
                raise
            where = f"{prompt.prompt_id} (draw {draw})"
            raise RunFailed(
                f"workflow {self.workflow_name} was cancelled from within on {where}"
            ) from error
        except Exception as error:
            raise RunFailed(
                f"workflow {self.workflow_name} failed on {prompt.prompt_id} (draw {draw}):"
                f" {type(error).__name__}: {error}"
            ) from error
        finally:
            if gate:
                gate.leave(member)
        self._check(samples, prompt, greedy)
        self._fill_text(samples)
        self._stage[member] = "reward"
        return samples

    async def _scored(self, group: Group) -> Group:
        """The same group with its rewards, in one call of the scorer whatever finished first."""
        counts = await self.scorer.score([*group.samples, *group.greedy])
        self.failures.errors += counts.errors
        self.failures.timeouts += counts.timeouts
        for kind in (False, True):
            self._stage.pop((group.draw, kind), None)
        if group.greedy:
            baseline = sum(sample.reward for sample in group.greedy) / len(group.greedy)
            for sample in group.samples:
                sample.baseline_reward = baseline
        return group

    def _staged(self, member: Member, generate: Generate) -> Generate:
        async def staged(request: GenerateRequest) -> list[Completion]:
            self._stage[member] = "generation"
            completions = await self.partial.whole(generate, request)
            self._stage[member] = "workflow"
            return completions

        return staged

    def _check(self, samples: object, prompt: Prompt, greedy: bool) -> None:
        if (
            not isinstance(samples, list)
            or not samples
            or not all(isinstance(s, Sample) for s in samples)
        ):
            raise RunFailed(
                f"workflow {self.workflow_name} returned {type(samples).__name__} for"
                f" {prompt.prompt_id}, expected a list of at least one Sample"
            )
        try:
            for sample in samples:
                sample.check_token_rewards()
                for name, key in ({} if greedy else self.recorded).items():
                    if getattr(sample, name) is None:
                        raise ValueError(
                            f"{key} is on, but a sample has no {name}: give it those of its"
                            " completions, joined"
                        )
        except ValueError as error:
            raise RunFailed(f"workflow {self.workflow_name}: {error}") from error

    def _fill_text(self, samples: Sequence[Sample]) -> None:
        bare = [sample for sample in samples if not sample.response_text]
        texts = decode(self.tokenizer, [sample.tokens[sample.loss_mask == 1] for sample in bare])
        for sample, text in zip(bare, texts, strict=True):
            sample.response_text = text

    def room(self, samples: int) -> int:
        """Groups that engines would begin at once; where they batch call by call, those of one wave
        when none is at work.

        Args:
            samples: of a group.
        """
        # and will soon ask for a generation
        starting = sum(stage == "start" for stage in self._stage.values())
        kinds = 1 if self.greedy is None else 2
        if not self.batched:
            return (self.dispatcher.free_calls - starting) // kinds
        free = 0 if starting else self.dispatcher.free_sequences
        return max(1, free // (samples + kinds - 1)) if free else 0

    def stuck(self, of: Container[int] | None = None) -> str:
        """Who is being waited for. `of`: looks at these draws alone."""
        parts = []
        for stages, party in (
            (("start", "workflow"), f"workflow {self.workflow_name}"),
            (
                ("generation",),
                self.dispatcher.waiting_for()
                or "the gate (other workflows have not asked for generation)",
            ),
            (("reward",), "the reward"),
        ):
            at_them = (
                draw
                for (draw, _), stage in self._stage.items()
                if stage in stages and (of is None or draw in of)
            )
            draws = list(dict.fromkeys(at_them))
            if draws:
                parts.append(
                    f"{len(draws)} of the prompts wait for {party}, the first is"
                    f" {self.prompt_of(draws[0]).prompt_id}"
                )
        return "; ".join(parts) or "no prompt is unfinished"


EVALUATION_SEED = 0x6576616C  # keeps evaluation's random numbers apart from training's


# keeps the addresses of greedy requests apart from those of the samples beside them
BASELINE_SEED = 0x67726565


PromptOf = Callable[[int], Prompt]


@dataclass(frozen=True)
class Runners:
    """Builds the `GroupRunner`s of a service, which share its engines and its reward."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    dispatcher: Dispatcher
    scorer: Scorer

    def training(self, prompt_of: PromptOf, *, greedy_baseline: bool) -> GroupRunner:
        rollout = self.config.rollout
        seed = self.config.run.seed
        greedy = self._greedy()
        given = rollout.sampling
        policy = self.config.policy
        sampling = replace(
            greedy, temperature=given.temperature, top_p=given.top_p, top_k=given.top_k,
            sampling_mask=policy.logprobs.keep_sets, routed_experts=policy.routing_replay == "engine",
        )  # fmt: skip
        workflow = self._workflow(sampling, rollout.samples_per_prompt, seed)
        baseline = self._workflow(greedy, 1, seed + BASELINE_SEED) if greedy_baseline else None
        return replace(
            self._runner(workflow, prompt_of, baseline), recorded=recorded_fields(self.config)
        )

    def evaluation(self, prompt_of: PromptOf) -> GroupRunner:
        given = self.config.evaluation
        seed = self.config.run.seed + EVALUATION_SEED
        sampling = replace(self._greedy(given.max_new_tokens), temperature=given.temperature)
        return self._runner(self._workflow(sampling, given.samples_per_prompt, seed), prompt_of)

    def _greedy(self, max_new_tokens: int | None = None) -> SamplingParams:
        """Temperature 0, with the stops and, by default, the length of training."""
        given = self.config.rollout.sampling
        return SamplingParams(
            max_new_tokens=max_new_tokens or given.max_new_tokens,
            temperature=0.0,
            stop_token_ids=stop_token_ids(self.tokenizer, given.stop_token_ids),
            stop=tuple(given.stop),
        )

    def _workflow(self, sampling: SamplingParams, samples: int, seed: int) -> Workflow:
        return build_workflow(
            self.config.rollout.workflow, WorkflowContext(sampling, samples, seed, self.tokenizer)
        )

    def _runner(
        self, workflow: Workflow, prompt_of: PromptOf, greedy: Workflow | None = None
    ) -> GroupRunner:
        return GroupRunner(
            workflow=workflow,
            workflow_name=self.config.rollout.workflow,
            prompt_of=prompt_of,
            dispatcher=self.dispatcher,
            scorer=self.scorer,
            tokenizer=self.tokenizer,
            partial=PartialRollouts(self.tokenizer),
            batched=kind_of(self.config.rollout.engine.kind).batches,
            greedy=greedy,
        )
