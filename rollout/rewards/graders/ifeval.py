"""The reward `ifeval`: whether a response follows constraints, in the terms of IFEval.

Zhou et al., arXiv 2311.07911. The names and keywords of the constraints are those of the data set
google/IFEval; open-instruct's own are in `open_instruct`. Written anew, since no package on PyPI
is kept: the one there is wants `datasets` and NLTK's downloads. Where IFEval asks NLTK, this counts
by regular expressions: sentences (by `.!?`) and words in capitals may differ from it in rare cases.
`english_capital` and `english_lowercase` do not ask which language it is; `response_language` does,
and needs the package langdetect.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlcore.data.sample import Sample
from rollout.rewards.graders.constraints import (
    Count,
    Language,
    Letter,
    Ordinal,
    Phrase,
    Phrases,
    Relation,
    parameters_of,
    read_parameters,
)
from rollout.rewards.graders.label_text import literal_of
from rollout.rewards.graders.open_instruct import FUNCTIONS
from rollout.rewards.graders.places import after_thinking

RELATIONS: dict[Relation, Callable[[int, int], bool]] = {
    "less than": lambda found, wanted: found < wanted,
    "at least": lambda found, wanted: found >= wanted,
}
_DETECT_LANGUAGE = ("language:response_language", "validate_response_language")
Constraint = tuple[str, dict[str, Any]]


def ifeval(sample: Sample, score: str = "all") -> dict[str, Any]:
    """1 where all constraints are followed, or the share of them that is; strict, as IFEval says.

    An empty response follows none.

    Raises:
        ValueError: the label and the row have no constraints that this can check.
    """
    response = after_thinking(sample.response_text)
    bare = response.strip()
    followed = {
        f"{index}:{name}": bool(bare)
        and (
            FUNCTIONS[name](bare, **keywords)  # open-instruct strips a response first
            if name in FUNCTIONS
            else CHECKERS[name](response, **keywords)
        )
        for index, (name, keywords) in enumerate(constraints_of(sample.label, sample.metadata))
    }
    right = all(followed.values())
    share = sum(followed.values()) / len(followed)
    return {
        "score": share if score == "share" else float(right),
        "correct": right,
        "info": followed,
    }


def constraints_of(label: Any, row: Mapping[str, Any]) -> list[Constraint]:
    """The constraints of a row.

    They stand in the label (`{"instruction_id": [...], "kwargs": [...]}`, or open-instruct's
    `{"func_name": ..., "N": ...}`, as an object, a list with one, or either as text of JSON or
    Python), or else in the row's columns `instruction_id_list` and `kwargs`, as google/IFEval has.

    Raises:
        ValueError: they do not, or one is unknown, or its parameters are not what it takes.
    """
    given = literal_of(label)
    if isinstance(given, list) and len(given) == 1:
        given = literal_of(given[0])
    if isinstance(given, Mapping) and "func_name" in given:
        rest = {key: value for key, value in given.items() if key != "func_name"}
        return [_constraint(given["func_name"], rest)]
    given = given if isinstance(given, Mapping) else row
    names, keywords = (
        literal_of(next((given[key] for key in keys if given.get(key) is not None), None))
        for keys in (("instruction_id_list", "instruction_id"), ("kwargs",))
    )
    if not isinstance(names, list) or not names or not isinstance(keywords, list):
        raise ValueError(
            "expected constraints as {instruction_id: [...], kwargs: [...]} or {func_name: ...} in"
            " the label, or as the columns instruction_id_list and kwargs, got the label"
            f" {str(label)[:80]!r}"
        )
    if len(names) != len(keywords):
        raise ValueError(f"{len(names)} constraints, but {len(keywords)} kwargs")
    return [_constraint(name, given) for name, given in zip(names, keywords)]


def _constraint(name: Any, given: Any) -> Constraint:
    parameters = PARAMETERS.get(name) if isinstance(name, str) else None
    if parameters is None:
        raise ValueError(f"the constraint {name!r} is unknown; known are {', '.join(PARAMETERS)}")
    if name in _DETECT_LANGUAGE and importlib.util.find_spec("langdetect") is None:
        raise ValueError(f"the constraint {name} needs a package: pip install langdetect")
    return name, read_parameters(name, parameters, given)


# --- one function a constraint --------------------------------------------------------------------


def _count(text: str, word: str) -> int:
    return len(re.findall(re.escape(word), text, re.IGNORECASE))


def keywords_existence(text: str, keywords: Phrases) -> bool:
    """Every keyword occurs."""
    return all(_count(text, keyword) for keyword in keywords)


def keyword_frequency(text: str, keyword: Phrase, frequency: Count, relation: Relation) -> bool:
    """A keyword occurs so often."""
    return RELATIONS[relation](_count(text, keyword.strip()), frequency)


def forbidden_words(text: str, forbidden_words: Phrases) -> bool:
    """None of the words occurs."""
    return not any(
        re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words
    )


def letter_frequency(
    text: str, letter: Letter, let_frequency: Count, let_relation: Relation
) -> bool:
    """A letter occurs so often, in either case."""
    return RELATIONS[let_relation](text.lower().count(letter.strip().lower()), let_frequency)


def response_language(text: str, language: Language) -> bool:
    """The response is in this language; text without a language passes."""
    import langdetect

    langdetect.DetectorFactory.seed = 0  # it guesses at random otherwise
    try:
        return str(langdetect.detect(text)) == language
    except langdetect.LangDetectException:
        return True


def number_sentences(text: str, num_sentences: Count, relation: Relation) -> bool:
    """The response has so many sentences."""
    ends = re.findall(r"[.!?。！？]+[\"')\]]*(?=\s|$)|\S\s*$", text.strip())
    open_end = [end for end in ends if not re.match(r"[.!?。！？]", end)]
    return RELATIONS[relation](len(ends) - len(open_end) + bool(open_end), num_sentences)


def number_paragraphs(text: str, num_paragraphs: Count) -> bool:
    """`***` parts so many paragraphs."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    inner = parts[1:-1]
    whole = [part for part in parts if part.strip()]
    return all(part.strip() for part in inner) and len(whole) == num_paragraphs


def number_words(text: str, num_words: Count, relation: Relation) -> bool:
    """The response has so many words."""
    return RELATIONS[relation](len(re.findall(r"\w+", text)), num_words)


def nth_paragraph_first_word(
    text: str, num_paragraphs: Count, nth_paragraph: Ordinal, first_word: Phrase
) -> bool:
    """Empty lines part so many paragraphs, and the n-th begins with this word."""
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if count != num_paragraphs or nth_paragraph > count or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: Count) -> bool:
    """At least so many placeholders, as [address]."""
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def postscript(text: str, postscript_marker: Phrase) -> bool:
    """A postscript, as P.S. or P.P.S."""
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = patterns.get(postscript_marker.strip()) or re.escape(postscript_marker.lower())
    return re.search(pattern, text.lower()) is not None


def number_bullet_lists(text: str, num_bullets: Count) -> bool:
    """Exactly so many bullets, `*` or `-`."""
    stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE)) == num_bullets


def constrained_response(text: str) -> bool:
    """One of the three answers of IFEval."""
    return any(f"My answer is {word}." in text for word in ("yes", "no", "maybe"))


def number_highlighted_sections(text: str, num_highlights: Count) -> bool:
    """At least so many highlights, `*this*` or `**this**`."""
    single = [one for one in re.findall(r"\*[^\n\*]*\*", text) if one.strip("*").strip()]
    double = [one for one in re.findall(r"\*\*[^\n\*]*\*\*", text) if one[2:-2].strip()]
    return len(single) + len(double) >= num_highlights


def multiple_sections(text: str, section_spliter: Phrase, num_sections: Count) -> bool:
    """At least so many sections, each begun by the word and a number."""
    marks = re.split(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text)
    return len(marks) - 1 >= num_sections


def json_format(text: str) -> bool:
    """The whole response is JSON, fenced or not."""
    bare = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(bare.strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """A title in <<double angles>>."""
    return any(one.strip("<>").strip() for one in re.findall(r"<<[^\n]+>>", text))


def two_responses(text: str) -> bool:
    """Two different responses, parted by six asterisks."""
    parts = text.split("******")
    whole = [part.strip() for part in parts if part.strip()]
    return all(part.strip() for part in parts[1:-1]) and len(whole) == 2 and whole[0] != whole[1]


def repeat_prompt(text: str, prompt_to_repeat: Phrase) -> bool:
    """The response begins with the prompt."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: Phrase) -> bool:
    """The response ends with the phrase."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """The whole response is in double quotes."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def capital_word_frequency(text: str, capital_frequency: Count, capital_relation: Relation) -> bool:
    """So many words in capitals."""
    words = re.findall(r"\w+(?:-\w+)*", text)
    return RELATIONS[capital_relation](sum(word.isupper() for word in words), capital_frequency)


def english_capital(text: str) -> bool:
    """No small letters."""
    return text.isupper()


def english_lowercase(text: str) -> bool:
    """No capital letters."""
    return text.islower()


def no_comma(text: str) -> bool:
    """No comma."""
    return "," not in text


CHECKERS: dict[str, Callable[..., bool]] = {
    "keywords:existence": keywords_existence,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
# what each takes beside the text, of both tables
PARAMETERS = {name: parameters_of(check) for name, check in {**CHECKERS, **FUNCTIONS}.items()}
