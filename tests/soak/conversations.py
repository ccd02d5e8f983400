"""What `--conversations` trains: turns, a branch, and tries that fail between two turns."""

from __future__ import annotations

from collections import Counter

from rlcore.data.generation import Generate
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rollout.workflows.context import WorkflowContext


class FailingBranches:
    """Two turns that go on in two ways; the first try of every third rollout fails in between.

    What is trained does not depend on the failures: a rollout that is tried again is the same.
    """

    def __init__(self, context: WorkflowContext) -> None:
        self.context = context
        self.tries = Counter[tuple[int, int]]()

    async def rollout(
        self, prompt: Prompt, draw: int, index: int, generate: Generate
    ) -> list[Sample]:
        first = self.context.conversation(prompt, draw, index, generate)
        await first.generate(4)
        self.tries[draw, index] += 1
        if (draw + index) % 3 == 0 and self.tries[draw, index] == 1:
            raise ConnectionError("the sandbox is down")
        for number, branch in enumerate((first, first.fork()), start=1):
            branch.append_tokens(prompt.tokens[:number])
            await branch.generate(8)
        return first.samples()
