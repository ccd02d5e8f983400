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


class Constraint:
    """A check of a text against a constraint with parameters of these types."""

    def __init__(self, holds: Callable[..., bool], **types: Any) -> None:
        self.holds = holds
        self._types = types

    @cached_property
    def parameters(self) -> type[BaseModel]:
        """A model that validates the parameters strictly."""
        fields: dict[str, Any] = {name: (kind, ...) for name, kind in self._types.items()}
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


IFEVAL: dict[str, Constraint] = {
    "keywords:existence": Constraint(
        lambda text, keywords: all(_occurrences(text, one) for one in keywords), keywords=Phrases
    ),
    "keywords:frequency": Constraint(
        lambda text, keyword, frequency, relation: _compare(
            _occurrences(text, keyword.strip()), relation, frequency
        ),
        keyword=Phrase,
        frequency=Count,
        relation=Relation,
    ),
    "keywords:forbidden_words": Constraint(
        lambda text, forbidden_words: (
            not any(
                re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)
                for word in forbidden_words
            )
        ),
        forbidden_words=Phrases,
    ),
    "keywords:letter_frequency": Constraint(
        lambda text, letter, let_frequency, let_relation: _compare(
            text.lower().count(letter.strip().lower()), let_relation, let_frequency
        ),
        letter=Letter,
        let_frequency=Count,
        let_relation=Relation,
    ),
    # text without a detectable language passes
    "language:response_language": Constraint(
        lambda text, language: _language(text) in (language, None), language=Language
    ),
    "length_constraints:number_sentences": Constraint(
        lambda text, num_sentences, relation: _compare(_sentences(text), relation, num_sentences),
        num_sentences=Count,
        relation=Relation,
    ),
    "length_constraints:number_paragraphs": Constraint(
        lambda text, num_paragraphs: (
            (parts := _parts(text, r"\s?\*\*\*\s?")) is not None and len(parts) == num_paragraphs
        ),
        num_paragraphs=Count,
    ),
    "length_constraints:number_words": Constraint(
        lambda text, num_words, relation: _compare(
            len(re.findall(r"\w+", text)), relation, num_words
        ),
        num_words=Count,
        relation=Relation,
    ),
    "length_constraints:nth_paragraph_first_word": Constraint(
        _nth_paragraph_begins, num_paragraphs=Count, nth_paragraph=Ordinal, first_word=Phrase
    ),
    "detectable_content:number_placeholders": Constraint(
        lambda text, num_placeholders: _placeholders(text) >= num_placeholders,
        num_placeholders=Count,
    ),
    "detectable_content:postscript": Constraint(_has_postscript, postscript_marker=Phrase),
    "detectable_format:number_bullet_lists": Constraint(
        lambda text, num_bullets: _bullets(text) == num_bullets, num_bullets=Count
    ),
    "detectable_format:constrained_response": Constraint(
        lambda text: any(f"My answer is {word}." in text for word in ("yes", "no", "maybe"))
    ),
    "detectable_format:number_highlighted_sections": Constraint(
        lambda text, num_highlights: _highlights(text) >= num_highlights, num_highlights=Count
    ),
    "detectable_format:multiple_sections": Constraint(
        lambda text, section_spliter, num_sections: (
            len(re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text))
            >= num_sections
        ),
        section_spliter=Phrase,
        num_sections=Count,
    ),
    # with or without a fence
    "detectable_format:json_format": Constraint(
        lambda text: _is_json(
            re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE).strip()
        )
    ),
    "detectable_format:title": Constraint(
        lambda text: any(one.strip("<>").strip() for one in re.findall(r"<<[^\n]+>>", text))
    ),
    "combination:two_responses": Constraint(_two_parts),
    "combination:repeat_prompt": Constraint(
        lambda text, prompt_to_repeat: (
            text.strip().lower().startswith(prompt_to_repeat.strip().lower())
        ),
        prompt_to_repeat=Phrase,
    ),
    "startend:end_checker": Constraint(
        lambda text, end_phrase: (
            text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
        ),
        end_phrase=Phrase,
    ),
    "startend:quotation": Constraint(
        lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"'
    ),
    "change_case:capital_word_frequency": Constraint(
        lambda text, capital_frequency, capital_relation: _compare(
            sum(word.isupper() for word in re.findall(r"\w+(?:-\w+)*", text)),
            capital_relation,
            capital_frequency,
        ),
        capital_frequency=Count,
        capital_relation=Relation,
    ),
    "change_case:english_capital": Constraint(lambda text: text.isupper()),
    "change_case:english_lowercase": Constraint(lambda text: text.islower()),
    "punctuation:no_comma": Constraint(lambda text: "," not in text),
}


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


OPEN_INSTRUCT: dict[str, Constraint] = {
    "verify_keywords": Constraint(
        lambda text, keyword_list: all(one.lower() in text.lower() for one in keyword_list),
        keyword_list=Phrases,
    ),
    "verify_keyword_frequency": Constraint(
        lambda text, word, N: re.findall(r"\b\w+\b", text.lower()).count(word.lower()) == N,
        word=Phrase,
        N=Count,
    ),
    # including occurrences inside other words
    "validate_forbidden_words": Constraint(
        lambda text, forbidden_words: (
            not any(word.lower() in text.lower() for word in forbidden_words)
        ),
        forbidden_words=Phrases,
    ),
    "verify_letter_frequency": Constraint(
        lambda text, letter, N: text.count(letter) == N, letter=Letter, N=Count
    ),
    "validate_response_language": Constraint(
        lambda text, language: _language(text) == language, language=Language
    ),
    "verify_paragraph_count": Constraint(_filled_paragraphs, N=Count),
    "validate_word_constraint": Constraint(
        lambda text, N, quantifier: _meets(len(text.split()), N, quantifier, _tenth(N)),
        N=Count,
        quantifier=Quantifier,
    ),
    "verify_sentence_constraint": Constraint(
        lambda text, N, quantifier: _meets(_ended_sentences(text), N, quantifier, 1),
        N=Count,
        quantifier=Quantifier,
    ),
    "validate_paragraphs": Constraint(_ith_paragraph_begins, N=Count, first_word=Phrase, i=Ordinal),
    "verify_postscript": Constraint(_followed_postscript, postscript_marker=Phrase),
    "validate_placeholders": Constraint(lambda text, N: _placeholders(text) >= N, N=Count),
    "verify_bullet_points": Constraint(
        lambda text, N: sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N,
        N=Count,
    ),
    "validate_title": Constraint(lambda text: re.search(r"<<.*?>>", text) is not None),
    "validate_choice": Constraint(
        lambda text, options: any(option in text for option in options), options=Phrases
    ),
    "validate_highlighted_sections": Constraint(
        lambda text, N: len(re.findall(r"\*.*?\*", text)) >= N, N=Count
    ),
    "validate_sections": Constraint(
        lambda text, N, section_splitter: (
            len(re.findall(rf"{re.escape(section_splitter)}\s?\d+", text, re.IGNORECASE)) >= N
        ),
        N=Count,
        section_splitter=Phrase,
    ),
    "validate_json_format": Constraint(_is_json),
    "validate_repeat_prompt": Constraint(
        lambda text, original_prompt: text.startswith(original_prompt), original_prompt=Phrase
    ),
    "validate_two_responses": Constraint(_two_texts),
    "validate_uppercase": Constraint(lambda text: text == text.upper()),
    "validate_lowercase": Constraint(lambda text: text == text.lower()),
    "validate_frequency_capital_words": Constraint(
        lambda text, N, quantifier: _meets(
            len(re.findall(r"\b[A-Z]+\b", text)), N, quantifier, _tenth(N)
        ),
        N=Count,
        quantifier=Quantifier,
    ),
    "validate_end": Constraint(
        lambda text, end_phrase: text.endswith(end_phrase), end_phrase=Phrase
    ),
    "validate_quotation": Constraint(lambda text: text.startswith('"') and text.endswith('"')),
    "validate_no_commas": Constraint(lambda text: "," not in text),
}
