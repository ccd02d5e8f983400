"""The workflow `single_turn`: each sample is one prompt and one response."""

from __future__ import annotations

from rlcore.data.generation import Generate, GenerateRequest
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rollout.conversation.samples import make_sample
from rollout.workflows.context import WorkflowContext


class SingleTurn:
    """Makes `samples_per_prompt` independent responses to each prompt."""

    def __init__(self, context: WorkflowContext) -> None:
        self._context = context

    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> list[Sample]:
        """See `rlcore.interfaces.Workflow`."""
        context = self._context
        request = GenerateRequest(
            prompt.tokens,
            context.sampling,
            draw,
            n=context.samples_per_prompt,
            seed=context.seed,
            policy=context.policy,
        )
        return [
            make_sample(prompt, draw, i, completion)
            for i, completion in enumerate(await generate(request))
        ]
