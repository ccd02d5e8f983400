"""The responses on which `rlcore data` tries the reward: right ones, made of the label, and one
that is wrong.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from rlcore.config.sections.graders import GRADERS
from rlcore.config.sections.reward import RewardConfig
from rlcore.data.examples import Example
from rlcore.data.prompts import PromptSet
from rollout.rewards.scorer import PartsBySource

_OTHERS = 100  # rows among which a wrong answer is looked for
_NO_ANSWER = "I do not know."
# what a place looks like, and what it is called
_PLACES = {
    "boxed": ("\\boxed{{{}}}", "in a box"),
    "hash": ("#### {}", "behind ####"),
    "tagged": ("<answer>{}</answer>", "in <answer>"),
    "line": ("Answer: {}", "in a line"),
}


class TrialAnswers:
    """Makes responses for rows, each where the parts that score its row look for an answer."""

    def __init__(self, reward: RewardConfig, prompts: PromptSet) -> None:
        self._reward = reward
        self._rule = PartsBySource(reward)
        self._examples = prompts.examples

    def of(self, example: Example) -> dict[str, str]:
        """Return responses and what each is, right ones first and the wrong one last.

        There are none where the label is no answer: it is missing, or holds tests or constraints.
        """
        if not self._answers(example):
            return {}
        label = str(example.label)
        end = label.rsplit("####", maxsplit=1)[-1].strip()  # as openai/gsm8k has it
        right = {label: "the label itself"}
        for place in self._places(example):
            form, name = _PLACES[place]
            boxed = place == "boxed" and "boxed" in end
            right.setdefault(end if boxed else form.format(end), f"the label {name}")
        others = (o for o in islice(self._examples, _OTHERS) if self._answers(o))
        alike = (o for o in others if self._rule.of(o.extra) == self._rule.of(example.extra))
        wrong = next((str(o.label) for o in alike if str(o.label) != label), _NO_ANSWER)
        return {**right, wrong: "a wrong answer"}

    def _answers(self, example: Example) -> bool:
        label: Any = example.label
        if isinstance(label, bool) or not isinstance(label, str | int | float):
            return False
        return "other" not in self._kinds(example) and "answer" in self._kinds(example)

    def _kinds(self, example: Example) -> set[str]:
        """What the parts that score the row take its label for."""
        kinds = {"tests": "other", "constraints": "other", "none": "nothing"}
        functions = [
            str(self._reward.parts[name].function) for name in self._rule.of(example.extra)
        ]
        return {
            kinds.get(GRADERS[name].label, "answer") if name in GRADERS else "answer"
            for name in functions
        }

    def _places(self, example: Example) -> list[str]:
        """The places where the parts look; a box for those that take any."""
        given = (self._reward.parts[name].args for name in self._rule.of(example.extra))
        places = [str(args.get("answer", "last")) for args in given]
        return [place if place in _PLACES else "boxed" for place in places]
