"""The responses on which a reward is audited: right ones, made from the label, and cheap ones,
which a policy finds without solving the task.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from rlcore.config.sections.graders import GRADERS
from rlcore.config.sections.reward import RewardConfig
from rlcore.data.examples import Example
from rlcore.data.prompts import PromptSet
from rlcore.data.sample import FinishReason
from rollout.rewards.scorer import PartsBySource

OTHERS = 100  # rows searched for other labels
MAX_NUMBERS = 4  # numbers of one prompt that are tried
MAX_EXPRESSIONS = 4
MAX_LISTED = 6  # labels in a list of answers
REFUSAL = "I'm sorry, but I cannot help with that."


@dataclass(frozen=True)
class Kind:
    """A kind of answer.

    Attributes:
        verdict: whether an answer of this kind should score; "either" leaves that open.
    """

    name: str
    verdict: Literal["right", "wrong", "either"]


RIGHT = Kind("the right answer", "right")
NOTHING = Kind("nothing", "wrong")
PROMPT = Kind("the prompt", "wrong")
SENTENCE = Kind("the last sentence of the prompt", "wrong")
NUMBER = Kind("a number of the prompt", "wrong")
EXPRESSION = Kind("an expression of the prompt", "wrong")
LISTED = Kind("a list of answers", "wrong")
OTHER = Kind("the label of another row", "wrong")
REFUSED = Kind("a refusal", "wrong")
EMPTY = Kind("the format without content", "wrong")
THOUGHT = Kind("the right answer inside a thought", "wrong")
LATER = Kind("the right answer after a wrong one", "either")
CUT = Kind("the right answer, cut off by length", "either")
# in the order of the report
KINDS = (
    *(RIGHT, NOTHING, PROMPT, SENTENCE, NUMBER, EXPRESSION, LISTED, OTHER, REFUSED, EMPTY),
    *(THOUGHT, LATER, CUT),
)

# form of the answer at each place, and its name
_PLACES = {
    "boxed": ("\\boxed{{{}}}", "in a box"),
    "hash": ("#### {}", "behind ####"),
    "tagged": ("<answer>{}</answer>", "in <answer>"),
    "line": ("Answer: {}", "in a line"),
}
_EMPTY_FORMATS = (
    *("\\boxed{}", "#### ", "<answer></answer>", "Answer: ", "```python\n```"),
    "<think>\n\n</think>\n\n<answer>\n\n</answer>",
    "<think>...</think>\n<answer>...</answer>",
)
_NUMBER = re.compile(r"\d+(?:[.,/]\d+)*")
_OPERAND = r"[(\[{]*\d[\d.,]*[)\]}!]*"
_OPERATOR = r"(?:\\(?:times|cdot|div)\b|\*\*|[-+*/^×÷·%−])"
_ARITHMETIC = re.compile(rf"-?{_OPERAND}(?:\s*{_OPERATOR}\s*{_OPERAND})+")
_LATEX = re.compile(r"\$+([^$]{1,200})\$+|\\\((.{1,200}?)\\\)|\\\[(.{1,200}?)\\\]", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|\n+")


@dataclass(frozen=True)
class AuditAnswer:
    """One response, its kind, and a description."""

    kind: Kind
    text: str
    described: str
    finish_reason: FinishReason = "stop"


class AuditAnswers:
    """Makes responses for rows, with the answer wherever the parts that score the row look."""

    def __init__(self, reward: RewardConfig, prompts: PromptSet) -> None:
        self._reward = reward
        self._rule = PartsBySource(reward)
        self._others = [o for o in islice(prompts.examples, OTHERS) if self._has_answer(o)]

    def of(self, example: Example, prompt: str) -> list[AuditAnswer]:
        """The distinct answers for a row, right ones first.

        Answers that need the label are left out if the label is no answer: it is missing, or
        holds tests or constraints. A cheap answer that equals the label is left out, too.

        Args:
            prompt: the question without the marks of a chat template.
        """
        found: dict[tuple[str, str], AuditAnswer] = {}
        golds = [_end(example.label)] if self._has_answer(example) else []
        for answer in (*self._right(example), *self._cheap(example, prompt)):
            right = any(same_answer(answer.text, gold) for gold in golds)
            if not (right and answer.kind.verdict == "wrong"):
                found.setdefault((answer.text, answer.finish_reason), answer)
        return list(found.values())

    def _right(self, example: Example) -> Iterator[AuditAnswer]:
        if not self._has_answer(example):
            return
        yield AuditAnswer(RIGHT, str(example.label), "the label itself")
        end = _end(example.label)
        for place in self._places(example):
            form, name = _PLACES[place]
            boxed = place == "boxed" and "boxed" in end
            yield AuditAnswer(RIGHT, end if boxed else form.format(end), f"the label {name}")

    def _cheap(self, example: Example, prompt: str) -> Iterator[AuditAnswer]:
        """Yield the cheap answers, including those that give a value at each place."""
        forms = ["{}", *(_PLACES[place][0] for place in self._places(example))]

        def placed(kind: Kind, texts: Iterable[str]) -> Iterator[AuditAnswer]:
            texts = list(texts)
            for form in dict.fromkeys(forms):
                for text in texts:
                    yield AuditAnswer(kind, form.format(text), kind.name)

        # first, since the label of another row may occur in the prompt too
        yield from self._with_label(example, forms)
        expressions = _expressions(prompt)
        yield AuditAnswer(NOTHING, "", NOTHING.name)
        # not at the places: parsing prose in a box as mathematics takes long
        yield AuditAnswer(PROMPT, prompt.strip(), PROMPT.name)
        sentences = [part.strip() for part in _SENTENCE_END.split(prompt) if part.strip()]
        for sentence in sentences[-1:]:
            yield AuditAnswer(SENTENCE, sentence, SENTENCE.name)
        yield from placed(NUMBER, dict.fromkeys(_NUMBER.findall(prompt)[-MAX_NUMBERS:]))
        yield from placed(EXPRESSION, expressions)
        for text in expressions:
            begun = f"To find {text}, we need to perform the"
            yield AuditAnswer(EXPRESSION, begun, EXPRESSION.name, "length")
        yield AuditAnswer(REFUSED, REFUSAL, REFUSED.name)
        for text in _EMPTY_FORMATS:
            yield AuditAnswer(EMPTY, text, EMPTY.name)

    def _with_label(self, example: Example, forms: Sequence[str]) -> Iterator[AuditAnswer]:
        """Yield the answers made from the label and from other rows' labels."""
        if not self._has_answer(example):
            return
        gold = _end(example.label)
        others = self._other_labels(example)
        for form in dict.fromkeys(forms):
            right = form.format(gold)
            yield AuditAnswer(THOUGHT, f"<think>\n{right}\n</think>\n\n", THOUGHT.name)
            yield AuditAnswer(CUT, f"The answer is {right}", CUT.name, "length")
            if not others:
                continue
            # never put the label last in a list: a reward may reasonably take the last answer
            listed = [*others[: len(others) // 2], gold, *others[len(others) // 2 :]]
            yield AuditAnswer(LISTED, form.format(", ".join(listed)), LISTED.name)
            yield AuditAnswer(LISTED, ", ".join(map(form.format, listed)), LISTED.name)
            wrong = form.format(others[0])
            yield AuditAnswer(OTHER, wrong, "a wrong answer")
            yield AuditAnswer(LATER, f"{wrong}\nNo, that is wrong: {right}", LATER.name)

    def _other_labels(self, example: Example) -> list[str]:
        """Labels of rows with the same parts, each a different answer."""
        mine = self._rule.of(example.extra)
        found = [_end(example.label)]
        for other in self._others:
            if len(found) < MAX_LISTED and self._rule.of(other.extra) == mine:
                label = _end(other.label)
                if not any(same_answer(label, one) for one in found):
                    found.append(label)
        return found[1:]

    def _has_answer(self, example: Example) -> bool:
        """Whether the label of a row is an answer that its parts compare."""
        label: Any = example.label
        if isinstance(label, bool) or not isinstance(label, str | int | float):
            return False
        names = [str(self._reward.parts[name].function) for name in self._rule.of(example.extra)]
        kinds = [GRADERS[name].label if name in GRADERS else "text" for name in names]
        return {"tests", "constraints"}.isdisjoint(kinds) and bool({*kinds} - {"none"})

    def _places(self, example: Example) -> list[str]:
        """The places where the parts look; a box for parts that accept any place."""
        given = (self._reward.parts[name].args for name in self._rule.of(example.extra))
        places = [str(args.get("answer", "last")) for args in given]
        return [place if place in _PLACES else "boxed" for place in places]


def same_answer(a: str, b: str) -> bool:
    """Whether two texts are the same answer: equal up to white space and `$`, or equal numbers."""
    plain = [text.strip(" \t\n$.").replace(",", "").casefold() for text in (a, b)]
    if plain[0] == plain[1]:
        return True
    try:
        return float(plain[0]) == float(plain[1])
    except ValueError:
        return False


def _end(label: Any) -> str:
    """The answer in a label; openai/gsm8k's labels are solutions that end in `#### 72`."""
    return str(label).rsplit("####", maxsplit=1)[-1].strip()


def _expressions(prompt: str) -> list[str]:
    """The last arithmetic and LaTeX expressions of a prompt."""
    arithmetic = [found.strip(" .,") for found in _ARITHMETIC.findall(prompt)]
    latex = ["".join(groups).strip() for groups in _LATEX.findall(prompt)]
    return list(dict.fromkeys(filter(None, [*arithmetic, *latex])))[-MAX_EXPRESSIONS:]
