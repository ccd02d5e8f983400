"""A workflow with two policies: an earlier one writes a draft, the trained one answers after it."""

from __future__ import annotations

from rlcore.data.generation import Generate
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rollout.workflows.context import WorkflowContext


class Revise:
    """The draft is context: the trained policy sees it, and learns from its own answer alone.

    Args:
        draft: who writes it, a name in `rollout.policies`.
    """

    def __init__(self, context: WorkflowContext, *, draft: str) -> None:
        self._context = context
        self._draft = draft

    async def rollout(
        self, prompt: Prompt, draw: int, index: int, generate: Generate
    ) -> list[Sample]:
        """Make a draft, repeat the question, and answer it."""
        conversation = self._context.conversation(prompt, draw, index, generate)
        await conversation.generate(policy=self._draft)
        conversation.append_tokens(prompt.tokens)
        await conversation.generate()
        return conversation.samples()
