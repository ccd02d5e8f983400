"""A wave: prompts that are worked on together, from workflow to reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlcore.data.sample import Sample
from rlcore.data.tokenizer import decode
from rlcore.errors import RlcoreError, RunFailed
from rlcore.protocols import Completion, Generate, GenerateRequest, Prompt, Workflow
from rollout.deadlines import together
from rollout.dispatch import Dispatcher
from rollout.gate import BatchGate
from rollout.rewards.scorer import FailureCounts, Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Group:
    """The scored samples of one draw."""

    draw: int
    samples: list[Sample]

    @property
    def aborted(self) -> bool:
        return any(sample.finish_reason == "abort" for sample in self.samples)


@dataclass
class WaveRunner:
    """Runs one workflow over draws. With `batched`, engines get the whole wave at once, in the order of the draws."""

    workflow: Workflow
    workflow_name: str
    prompt_of: Callable[[int], Prompt]
    dispatcher: Dispatcher
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    batched: bool
    failures: FailureCounts = field(default_factory=FailureCounts)     # of all waves so far
    _stage: dict[int, str] = field(default_factory=dict)                # of each draw that is unfinished

    async def run(self, draws: Sequence[int]) -> list[Group]:
        """The groups of `draws`, in that order. If one fails, all are given up.

        Raises:
            RunFailed: an engine or the workflow failed; names it, and the prompt.
        """
        self._stage = dict.fromkeys(draws, "workflow")
        gate = BatchGate(self.dispatcher.batch) if self.batched else None
        generators = [gate.enter(draw) if gate else self.dispatcher.one for draw in draws]
        try:
            return await together(*(self._one(draw, generate, gate) for draw, generate in zip(draws, generators, strict=True)))
        finally:
            if gate:
                await gate.close()

    async def _one(self, draw: int, generate: Generate, gate: BatchGate | None) -> Group:
        prompt = self.prompt_of(draw)
        try:
            samples = await self.workflow(prompt, draw, self._staged(draw, generate))
        except RlcoreError:
            raise
        except Exception as error:
            raise RunFailed(
                f"workflow {self.workflow_name} failed on {prompt.prompt_id} (draw {draw}): {type(error).__name__}: {error}"
            ) from error
        finally:
            if gate:
                gate.leave(draw)
        self._check(samples, prompt)
        self._fill_text(samples)
        self._stage[draw] = "reward"
        counts = await self.scorer.score(samples)
        self.failures.errors += counts.errors
        self.failures.timeouts += counts.timeouts
        del self._stage[draw]
        return Group(draw, samples)

    def _staged(self, draw: int, generate: Generate) -> Generate:
        async def staged(request: GenerateRequest) -> list[Completion]:
            self._stage[draw] = "generation"
            completions = await generate(request)
            self._stage[draw] = "workflow"
            return completions

        return staged

    def _check(self, samples: object, prompt: Prompt) -> None:
        if not isinstance(samples, list) or not samples or not all(isinstance(s, Sample) for s in samples):
            raise RunFailed(
                f"workflow {self.workflow_name} returned {type(samples).__name__} for {prompt.prompt_id}, "
                "expected a list of at least one Sample"
            )

    def _fill_text(self, samples: Sequence[Sample]) -> None:
        bare = [sample for sample in samples if not sample.response_text]
        texts = decode(self.tokenizer, [sample.tokens[sample.loss_mask == 1] for sample in bare])
        for sample, text in zip(bare, texts, strict=True):
            sample.response_text = text

    def stuck(self) -> str:
        """Who is being waited for."""
        parts = []
        for stage, party in (
            ("workflow", f"workflow {self.workflow_name}"),
            ("generation", self.dispatcher.waiting_for() or "the gate (other workflows have not asked for generation)"),
            ("reward", "the reward"),
        ):
            draws = [draw for draw, at in self._stage.items() if at == stage]
            if draws:
                parts.append(f"{len(draws)} of the prompts wait for {party}, the first is {self.prompt_of(draws[0]).prompt_id}")
        return "; ".join(parts) or "no prompt is unfinished"
