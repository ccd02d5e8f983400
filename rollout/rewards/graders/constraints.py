"""The constraints of IFEval and of open-instruct: a function of a text, and its parameters' types.

IFEval's constraints come from the data set google/IFEval (Zhou et al., arXiv 2311.07911), `strict`.
IFEval uses NLTK where this module counts by regular expressions: sentences (by `.!?`) and words in
capitals may differ in rare cases. `english_capital` and `english_lowercase` do not check the
language.

open-instruct's constraints come from its `if_functions`, for allenai/RLVR-IFeval and the mixed sets
of Tulu 3 (arXiv 2411.15124): the same 25 ideas with other rules (exact counts, "around", words
separated by spaces). Both are reimplemented here, since no package on PyPI is maintained.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from rollout.rewards.graders.places import literal_of


def _whole(value: Any) -> Any:
    """Convert 3.0 to 3: a column with nulls turns integers into floats."""
    is_whole = isinstance(value, np.integer) or (
        isinstance(value, float | np.floating) and float(value).is_integer()
    )
    return int(value) if is_whole else value


def _one_letter(value: str) -> str:
    if len(value.strip()) != 1:
        raise ValueError("expected one character")
    return value


# Types of parameters.
Count = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Ordinal = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Phrase = Annotated[str, Field(min_length=1)]
Letter = Annotated[str, AfterValidator(_one_letter)]
Phrases = Annotated[list[Phrase], BeforeValidator(literal_of), Field(min_length=1)]
# a name of langdetect, such as "zh-cn"
Language = Annotated[str, Field(pattern=r"^[a-z]{2}(-[a-z]{2})?$")]
Relation = Literal["less than", "at least"]
Quantifier = Literal["at least", "around", "at most"]


# The type of a parameter follows from its name.
TYPES: dict[str, Any] = {
    **dict.fromkeys(("N", "frequency", "let_frequency", "capital_frequency"), Count),
    **dict.fromkeys(("num_sentences", "num_paragraphs", "num_words", "num_sections"), Count),
    **dict.fromkeys(("num_placeholders", "num_bullets", "num_highlights"), Count),
    **dict.fromkeys(("nth_paragraph", "i"), Ordinal),
    **dict.fromkeys(("keyword", "word", "first_word", "postscript_marker", "end_phrase"), Phrase),
    **dict.fromkeys(("section_spliter", "section_splitter"), Phrase),
    **dict.fromkeys(("prompt_to_repeat", "original_prompt"), Phrase),
    **dict.fromkeys(("keywords", "keyword_list", "forbidden_words", "options"), Phrases),
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), Relation),
    "letter": Letter,
    "language": Language,
    "quantifier": Quantifier,
}


class Constraint:
    """A check of a text against a constraint, by a function of the text and its parameters."""

    def __init__(self, holds: Callable[..., bool]) -> None:
        self.holds = holds

    @cached_property
    def parameters(self) -> type[BaseModel]:
        """A model that validates the parameters strictly."""
        _, *names = inspect.signature(self.holds).parameters
        fields: dict[str, Any] = {name: (TYPES[name], ...) for name in names}
        config = ConfigDict(strict=True, extra="forbid")
        return create_model("Parameters", __config__=config, **fields)


# --- shared helpers -------------------------------------------------------------------------------


def _language(text: str) -> str | None:
    """The language of a text; None if it cannot be detected."""
    import langdetect

    # without a seed, detection is random
    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _placeholders(text: str) -> int:
    return len(re.findall(r"\[.*?\]", text))


# --- IFEval ---------------------------------------------------------------------------------------


def _compare(count: int, relation: Relation, wanted: int) -> bool:
    return count < wanted if relation == "less than" else count >= wanted


def _occurrences(text: str, word: str) -> int:
    return len(re.findall(re.escape(word), text, re.IGNORECASE))


def _sentences(text: str) -> int:
    ends = re.findall(r"[.!?。！？]+[\"')\]]*(?=\s|$)|\S\s*$", text.strip())
    open_end = [end for end in ends if not re.match(r"[.!?。！？]", end)]
    return len(ends) - len(open_end) + bool(open_end)


def _parts(text: str, mark: str) -> list[str] | None:
    """The parts between marks, without empty ends; None if an inner part is empty."""
    first, *inner = re.split(mark, text)
    last = inner.pop() if inner else ""
    if not all(part.strip() for part in inner):
        return None
    return [part.strip() for part in (first, *inner, last) if part.strip()]


def _two_parts(text: str) -> bool:
    parts = _parts(text, r"\*{6}")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _nth_paragraph_begins(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if count != num_paragraphs or nth_paragraph > count or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _has_postscript(text: str, postscript_marker: str) -> bool:
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = patterns.get(postscript_marker.strip()) or re.escape(postscript_marker.lower())
    return re.search(pattern, text.lower()) is not None


def _bullets(text: str) -> int:
    stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE))


def _highlights(text: str) -> int:
    single = [one for one in re.findall(r"\*[^\n\*]*\*", text) if one.strip("*").strip()]
    double = [one for one in re.findall(r"\*\*[^\n\*]*\*\*", text) if one[2:-2].strip()]
    return len(single) + len(double)


_IFEVAL: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(_occurrences(text, one) for one in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: _compare(
        _occurrences(text, keyword.strip()), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(
            re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words
        )
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _compare(
        text.lower().count(letter.strip().lower()), let_relation, let_frequency
    ),
    # text without a detectable language passes
    "language:response_language": lambda text, language: _language(text) in (language, None),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _compare(
        _sentences(text), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: (
        (parts := _parts(text, r"\s?\*\*\*\s?")) is not None and len(parts) == num_paragraphs
    ),
    "length_constraints:number_words": lambda text, num_words, relation: _compare(
        len(re.findall(r"\w+", text)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_begins,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        _placeholders(text) >= num_placeholders
    ),
    "detectable_content:postscript": _has_postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        _bullets(text) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: any(
        f"My answer is {word}." in text for word in ("yes", "no", "maybe")
    ),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        _highlights(text) >= num_highlights
    ),
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text)) >= num_sections
    ),
    # with or without a fence
    "detectable_format:json_format": lambda text: _is_json(
        re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE).strip()
    ),
    "detectable_format:title": lambda text: any(
        one.strip("<>").strip() for one in re.findall(r"<<[^\n]+>>", text)
    ),
    "combination:two_responses": _two_parts,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: (
        len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"'
    ),
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: (
        _compare(
            sum(word.isupper() for word in re.findall(r"\w+(?:-\w+)*", text)),
            capital_relation,
            capital_frequency,
        )
    ),
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "punctuation:no_comma": lambda text: "," not in text,
}
IFEVAL = {name: Constraint(holds) for name, holds in _IFEVAL.items()}


# --- open-instruct --------------------------------------------------------------------------------


def _meets(count: int, wanted: int, quantifier: Quantifier, slack: int) -> bool:
    if quantifier == "around":
        return abs(count - wanted) <= slack
    return count >= wanted if quantifier == "at least" else count <= wanted


def _tenth(number: int) -> int:
    return max(round(number * 0.1), 1)


def _filled_paragraphs(text: str, N: int) -> bool:
    parts = "\n".join(line.strip() for line in text.splitlines()).split("* * *")
    return len(parts) == N and all(part.strip() for part in parts)


def _ended_sentences(text: str) -> int:
    """Count sentences; "e.g." and "Dr." do not end one."""
    ends = (match.start() for match in re.finditer(r"(?<=[.?!])\s", text))
    ended = [at for at in ends if not re.search(r"(\w\.\w.|[A-Z][a-z]\.)\Z", text[:at][-4:])]
    return len(ended) + 1


def _ith_paragraph_begins(text: str, N: int, first_word: str, i: int) -> bool:
    parts = text.split("\n\n")
    return len(parts) == N and 0 < i <= N and parts[i - 1].strip().startswith(first_word)


def _followed_postscript(text: str, postscript_marker: str) -> bool:
    _, marker, rest = text.partition(postscript_marker)
    return bool(marker and rest.strip())


def _two_texts(text: str) -> bool:
    parts = text.split("******")
    return len(parts) == 2 and parts[0].strip() != parts[1].strip()


_OPEN_INSTRUCT: dict[str, Callable[..., bool]] = {
    "verify_keywords": lambda text, keyword_list: all(
        one.lower() in text.lower() for one in keyword_list
    ),
    "verify_keyword_frequency": lambda text, word, N: (
        re.findall(r"\b\w+\b", text.lower()).count(word.lower()) == N
    ),
    # including occurrences inside other words
    "validate_forbidden_words": lambda text, forbidden_words: (
        not any(word.lower() in text.lower() for word in forbidden_words)
    ),
    "verify_letter_frequency": lambda text, letter, N: text.count(letter) == N,
    "validate_response_language": lambda text, language: _language(text) == language,
    "verify_paragraph_count": _filled_paragraphs,
    "validate_word_constraint": lambda text, N, quantifier: _meets(
        len(text.split()), N, quantifier, _tenth(N)
    ),
    "verify_sentence_constraint": lambda text, N, quantifier: _meets(
        _ended_sentences(text), N, quantifier, 1
    ),
    "validate_paragraphs": _ith_paragraph_begins,
    "verify_postscript": _followed_postscript,
    "validate_placeholders": lambda text, N: _placeholders(text) >= N,
    "verify_bullet_points": lambda text, N: (
        sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N
    ),
    "validate_title": lambda text: re.search(r"<<.*?>>", text) is not None,
    "validate_choice": lambda text, options: any(option in text for option in options),
    "validate_highlighted_sections": lambda text, N: len(re.findall(r"\*.*?\*", text)) >= N,
    "validate_sections": lambda text, N, section_splitter: (
        len(re.findall(rf"{re.escape(section_splitter)}\s?\d+", text, re.IGNORECASE)) >= N
    ),
    "validate_json_format": _is_json,
    "validate_repeat_prompt": lambda text, original_prompt: text.startswith(original_prompt),
    "validate_two_responses": _two_texts,
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": lambda text, N, quantifier: _meets(
        len(re.findall(r"\b[A-Z]+\b", text)), N, quantifier, _tenth(N)
    ),
    "validate_end": lambda text, end_phrase: text.endswith(end_phrase),
    "validate_quotation": lambda text: text.startswith('"') and text.endswith('"'),
    "validate_no_commas": lambda text: "," not in text,
}
OPEN_INSTRUCT = {name: Constraint(holds) for name, holds in _OPEN_INSTRUCT.items()}
