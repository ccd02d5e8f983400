"""The arguments of the built-in graders: `reward.parts.NAME.args`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from rlcore.config.sections.base import Section

LabelKind = Literal["text", "mathematics", "letter", "tests", "constraints", "entry", "none"]
Place = Literal["last", "boxed", "hash", "tagged", "line"]


class GraderArgs(Section):
    """The arguments of one grader; its class variables say what the grader is."""

    # The grader says right or wrong, so a failure counts as wrong.
    verifies: ClassVar[bool] = True
    # The kind of label that the check at load requires.
    label: ClassVar[LabelKind] = "text"


class MathArgs(GraderArgs):
    """`math`: the answer equals the label as mathematics (math-verify)."""

    label: ClassVar[LabelKind] = "mathematics"

    answer: Place = "last"
    """Where the answer stands: the last one in the text, `\\boxed{}`, behind `####`, in
    `<answer></answer>`, or in the last line `Answer: ...`."""
    strict: bool = False
    """Accept no answer outside that place; false: if it is empty, the text's last answer counts."""
    form: Literal["evaluated", "any"] = "evaluated"
    """A number must be written out (`evaluated`), or `59+63` counts for 122 too (`any`)."""

    @model_validator(mode="after")
    def _strict_needs_a_place(self) -> MathArgs:
        if self.strict and self.answer == "last":
            raise ValueError("strict needs a place: set answer to boxed, hash, tagged or line")
        return self


class TextArgs(GraderArgs):
    """Where the answer stands, and which differences do not count."""

    answer: Literal["all", "boxed", "hash", "tagged", "line"] = "all"
    """The whole response (behind its `</think>`), or one of the places of `math`."""


class ExactMatchArgs(TextArgs):
    """`exact_match`: the answer is the label, except for white space around either."""

    ignore_case: bool = False
    """Lower-case both."""
    ignore_punctuation: bool = False
    """Drop ASCII punctuation from both."""
    ignore_articles: bool = False
    """Drop the words a, an, the from both."""
    ignore_space: bool = False
    """Read any white space as one space."""


class F1Args(TextArgs):
    """`f1`: the words shared with the label, as SQuAD counts them. Right: equal, normalised."""


class ChoiceArgs(GraderArgs):
    """`choice`: the response picks the label's letter."""

    label: ClassVar[LabelKind] = "letter"

    choices: str = "ABCDEFGHIJ"
    """The letters to choose from."""

    @field_validator("choices")
    @classmethod
    def _capital_letters(cls, value: str) -> str:
        if len(set(value)) != len(value) or not value.isascii() or not value.isupper():
            raise ValueError("expected different capital letters, as ABCD")
        return value


class FormatArgs(GraderArgs):
    """`format`: 1 where the response matches a regular expression, otherwise 0."""

    verifies: ClassVar[bool] = False
    label: ClassVar[LabelKind] = "none"

    pattern: str = Field(min_length=1)
    """A Python regular expression for the whole response; `.` matches line ends too."""


class OverlongArgs(GraderArgs):
    """`overlong`: DAPO's soft penalty, 0 down to -1 over the last `buffer` tokens."""

    verifies: ClassVar[bool] = False
    label: ClassVar[LabelKind] = "none"

    buffer: PositiveInt
    """Tokens before the limit over which the penalty grows."""
    max_tokens: PositiveInt | None = None
    """The limit; default: rollout.sampling.max_new_tokens."""


class IFEvalArgs(GraderArgs):
    """`ifeval`: the response follows constraints in IFEval's terms."""

    label: ClassVar[LabelKind] = "constraints"

    score: Literal["all", "share"] = "all"
    """1 where all constraints are followed, or the share of them that is."""


class CodeArgs(GraderArgs):
    """`code`: the response's last code block passes the tests of the label, in the sandbox."""

    label: ClassVar[LabelKind] = "tests"

    score: Literal["all", "share"] = "all"
    """1 where all tests pass, or the share of tests that does."""
    timeout_s: PositiveFloat = 5.0
    """Longest time for one test."""
    memory_mb: PositiveInt = 512
    """Most memory of one test, MiB."""
    tests: PositiveInt | None = None
    """Run only this many tests, from the first; default: all."""


class ReasoningGymArgs(TextArgs):
    """`reasoning_gym`: the score of the row's own task, 0 to 1. Right: 1."""

    label: ClassVar[LabelKind] = "entry"


# Built-in graders by their names in `function`.
GRADERS: dict[str, type[GraderArgs]] = {
    "exact_match": ExactMatchArgs,
    "math": MathArgs,
    "f1": F1Args,
    "choice": ChoiceArgs,
    "format": FormatArgs,
    "overlong": OverlongArgs,
    "ifeval": IFEvalArgs,
    "code": CodeArgs,
    "reasoning_gym": ReasoningGymArgs,
}
