"""The constraints of open-instruct's RLVR sets: `{"func_name": "validate_lowercase", "N": null}`.

allenai/RLVR-IFeval, and RLVR-GSM-MATH-IF-Mixed-Constraints for Tulu 3 (arXiv 2411.15124). They are
IFEval's 25, but ask for other things: exact counts, "around", words told apart by spaces. Names,
keywords and meaning are those of open-instruct's `if_functions`; written anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from rollout.rewards.graders.constraints import (
    Count,
    Language,
    Letter,
    Ordinal,
    Phrase,
    Phrases,
    Quantifier,
)


def _meets(count: int, wanted: int, quantifier: Quantifier, slack: int) -> bool:
    if quantifier == "around":
        return abs(count - wanted) <= slack
    return count >= wanted if quantifier == "at least" else count <= wanted


def _tenth(number: int) -> int:
    return max(round(number * 0.1), 1)


def keywords(text: str, keyword_list: Phrases) -> bool:
    """Every keyword occurs, in either case."""
    return all(keyword.lower() in text.lower() for keyword in keyword_list)


def keyword_frequency(text: str, word: Phrase, N: Count) -> bool:
    """The word occurs exactly so often, in either case."""
    return re.findall(r"\b\w+\b", text.lower()).count(word.lower()) == N


def forbidden_words(text: str, forbidden_words: Phrases) -> bool:
    """None of the words occurs, not even inside of another."""
    return not any(word.lower() in text.lower() for word in forbidden_words)


def letter_frequency(text: str, letter: Letter, N: Count) -> bool:
    """The letter occurs exactly so often, in this case."""
    return text.count(letter) == N


def response_language(text: str, language: Language) -> bool:
    """The response is in this language; text without a language is in none."""
    import langdetect

    langdetect.DetectorFactory.seed = 0  # it guesses at random otherwise
    try:
        return str(langdetect.detect(text)) == language
    except langdetect.LangDetectException:
        return False


def paragraph_count(text: str, N: Count) -> bool:
    """`* * *` parts exactly so many paragraphs, none of which is empty."""
    parts = "\n".join(line.strip() for line in text.splitlines()).split("* * *")
    return len(parts) == N and all(part.strip() for part in parts)


def word_constraint(text: str, N: Count, quantifier: Quantifier) -> bool:
    """So many words, told apart by spaces; "around" is within a tenth."""
    return _meets(len(text.split()), N, quantifier, _tenth(N))


def sentence_constraint(text: str, N: Count, quantifier: Quantifier) -> bool:
    """So many sentences; "around" is within one. "e.g." and "Dr." end none."""
    ends = (match.start() for match in re.finditer(r"(?<=[.?!])\s", text))
    ended = [at for at in ends if not re.search(r"(\w\.\w.|[A-Z][a-z]\.)\Z", text[:at][-4:])]
    return _meets(len(ended) + 1, N, quantifier, 1)


def paragraphs(text: str, N: Count, first_word: Phrase, i: Ordinal) -> bool:
    """Empty lines part exactly so many paragraphs, and the i-th begins with this text."""
    parts = text.split("\n\n")
    return len(parts) == N and 0 < i <= N and parts[i - 1].strip().startswith(first_word)


def postscript(text: str, postscript_marker: Phrase) -> bool:
    """The marker occurs, and something follows it."""
    _, marker, rest = text.partition(postscript_marker)
    return bool(marker and rest.strip())


def placeholders(text: str, N: Count) -> bool:
    """At least so many placeholders, as [address]."""
    return len(re.findall(r"\[.*?\]", text)) >= N


def bullet_points(text: str, N: Count) -> bool:
    """Exactly so many lines begin with `*` or `-`."""
    return sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N


def title(text: str) -> bool:
    """A title in <<double angles>>."""
    return re.search(r"<<.*?>>", text) is not None


def choice(text: str, options: Phrases) -> bool:
    """One of the options occurs."""
    return any(option in text for option in options)


def highlighted_sections(text: str, N: Count) -> bool:
    """At least so many highlights, `*this*`."""
    return len(re.findall(r"\*.*?\*", text)) >= N


def sections(text: str, N: Count, section_splitter: Phrase) -> bool:
    """At least so many sections, each begun by the word, in either case, and a number."""
    mark = rf"{re.escape(section_splitter)}\s?\d+"
    return len(re.findall(mark, text, re.IGNORECASE)) >= N


def json_format(text: str) -> bool:
    """The whole response is JSON, without a fence."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def repeat_prompt(text: str, original_prompt: Phrase) -> bool:
    """The response begins with the prompt."""
    return text.startswith(original_prompt)


def two_responses(text: str) -> bool:
    """Two different responses, parted by six asterisks."""
    parts = text.split("******")
    return len(parts) == 2 and parts[0].strip() != parts[1].strip()


def uppercase(text: str) -> bool:
    """No small letters."""
    return text == text.upper()


def lowercase(text: str) -> bool:
    """No capital letters."""
    return text == text.lower()


def frequency_capital_words(text: str, N: Count, quantifier: Quantifier) -> bool:
    """So many words in capitals; "around" is within a tenth."""
    return _meets(len(re.findall(r"\b[A-Z]+\b", text)), N, quantifier, _tenth(N))


def end(text: str, end_phrase: Phrase) -> bool:
    """The response ends with the phrase, to the letter."""
    return text.endswith(end_phrase)


def quotation(text: str) -> bool:
    """The whole response is in double quotes."""
    return text.startswith('"') and text.endswith('"')


def no_commas(text: str) -> bool:
    """No comma."""
    return "," not in text


FUNCTIONS: dict[str, Callable[..., bool]] = {
    "verify_keywords": keywords,
    "verify_keyword_frequency": keyword_frequency,
    "validate_forbidden_words": forbidden_words,
    "verify_letter_frequency": letter_frequency,
    "validate_response_language": response_language,
    "verify_paragraph_count": paragraph_count,
    "validate_word_constraint": word_constraint,
    "verify_sentence_constraint": sentence_constraint,
    "validate_paragraphs": paragraphs,
    "verify_postscript": postscript,
    "validate_placeholders": placeholders,
    "verify_bullet_points": bullet_points,
    "validate_title": title,
    "validate_choice": choice,
    "validate_highlighted_sections": highlighted_sections,
    "validate_sections": sections,
    "validate_json_format": json_format,
    "validate_repeat_prompt": repeat_prompt,
    "validate_two_responses": two_responses,
    "validate_uppercase": uppercase,
    "validate_lowercase": lowercase,
    "validate_frequency_capital_words": frequency_capital_words,
    "validate_end": end,
    "validate_quotation": quotation,
    "validate_no_commas": no_commas,
}
