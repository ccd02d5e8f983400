"""A workflow whose rollouts branch, and whose turns have rewards of their own."""

from __future__ import annotations

from rlcore.data.generation import Generate
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rollout.workflows.context import WorkflowContext


class RewardedBranches:
    """Asks once, and then goes on twice from that answer."""

    def __init__(self, context: WorkflowContext) -> None:
        self.context = context

    async def rollout(
        self, prompt: Prompt, draw: int, index: int, generate: Generate
    ) -> list[Sample]:
        first = self.context.conversation(prompt, draw, index, generate)
        await first.generate(3)
        first.reward(-0.5)
        for number, branch in enumerate((first, first.fork()), start=1):
            branch.append_tokens(prompt.tokens[:number])
            await branch.generate()
            branch.reward(0.25 * number * (index + 1))
        return first.samples()
